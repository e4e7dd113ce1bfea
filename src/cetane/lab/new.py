"""The template of a new experiment: a valid file whose parts are to be replaced."""

import datetime
import re

from cetane.errors import CetaneError
from cetane.lab.experiment import ID, parse_experiment
from cetane.validation import parse_toml

TEMPLATE = """\
title = "{name}"
status = "Prototype"
date = {date}
hypothesis = "What is expected, with numbers, and why."
metrics = ["weight_bytes", "perplexity_ratio", "decode_ms", "predicted_ms", "residency"]

[workload]
model = "zaya-tiny"  # or any name: cetane lab run {name} --where NAME=PATH says where it lies
tokens = 512
# context = 256  # of both arms, for a model with less than its recipes have

[baseline]
recipe = "zaya-int8"

[candidate]
recipe = "zaya-int8"
# [candidate.changes.compression]
# default = "palette4-kmeans-group32"

[[expects]]
metric = "weight_bytes"
of = "ratio"
most = 1.0

[[gates]]
metric = "perplexity_ratio"
most = 1.05
"""


def template(name: str, where: str) -> str:
    """The file of a new experiment. Raises CetaneError for an invalid name."""
    if not re.match(ID, name):
        raise CetaneError(
            f"{name!r}: no id for an experiment",
            "an id has small letters, digits and dashes, as wider-heads",
        )
    text = TEMPLATE.format(name=name, date=datetime.date.today().isoformat())
    parse_experiment({"id": name} | parse_toml(text, where), where)
    return text
