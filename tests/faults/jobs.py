"""Jobs that faults interrupt, each with what must be the same in the end."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.lab.journal import Journal
from cetane.lab.library import load_experiment
from cetane.lab.run import run as run_experiment
from cetane.lab.workload import Setting
from cetane.pipeline.draft_head import add_draft_heads, train_draft_head
from cetane.pipeline.draft_head_result import DraftHeadSettings
from cetane.pipeline.port import port
from cetane.schema.recipe import Recipe
from cetane.sweeps.run import sweep

TEXT = "The rating of how readily a fuel ignites is its cetane number. " * 40
EXPERIMENT = """
title = "Tiny"
status = "Measured"
date = 2026-04-13
hypothesis = "int8 is half of fp16."
lesson = "Small things are small."
metrics = ["weight_bytes"]
[workload]
model = "zaya-tiny"
text = "{folder}/text.txt"
tokens = 40
new_tokens = 4
[baseline]
recipe = "{folder}/small.toml"
[candidate]
recipe = "{folder}/small.toml"
[candidate.changes.compression]
default = "int8-per-channel"
[[expects]]
metric = "weight_bytes"
of = "ratio"
most = 0.6
[[gates]]
metric = "weight_bytes"
of = "ratio"
most = 0.6
"""
SMALL = """
name = "small"
[layout]
kind = "per-block"
[cache]
context = 64
[tokens]
verify = 3
prefill = 0
"""


@dataclass(frozen=True)
class Job:
    """`run` does the work in a folder, `result` tells what it made, as bytes that must not
    differ between an undisturbed run and a resumed one."""

    run: Callable[[Path], object]
    result: Callable[[Path], bytes]


def jobs(model: Path, recipe: Recipe, source: Path) -> dict[str, Job]:
    """The jobs by name: on the checkpoint `model`, and on the bundle that `prepare` puts into the
    folder. `source` is where add-head finds draft heads: the folder of a finished train-head."""

    def porting(folder: Path) -> object:
        return port(model, recipe=recipe, output=folder / "out")

    def sweeping(folder: Path) -> object:
        formats = ["int8-per-channel", "int8-per-tensor"]
        return sweep(model, text=folder / "text.txt", formats=formats, recipe=recipe,
                     output=folder / "sweep")  # fmt: skip

    def swept(folder: Path) -> bytes:
        lines = (folder / "sweep/sweep.jsonl").read_text().splitlines()
        points = {p["name"]: [p["kl"], p["perplexity"]] for p in map(json.loads, lines)}
        return json.dumps(points, sort_keys=True).encode()

    def experimenting(folder: Path) -> object:
        setting = Setting(folder / "lab", {"zaya-tiny": model})
        experiment = load_experiment(folder / "tiny.toml")
        outcome = run_experiment(experiment, setting, Journal(folder / "journal.jsonl"), silent)
        if outcome.status == "error":  # the journal has it; the next run goes on
            raise CetaneError(outcome.error)
        return outcome

    def learned(folder: Path) -> bytes:
        outcomes = Journal(folder / "journal.jsonl").events()
        return json.dumps(outcomes[-1].model_dump(mode="json")["arms"], sort_keys=True).encode()

    def training(folder: Path) -> object:
        settings = DraftHeadSettings(window=16, vocabulary=32, steps=2, epochs=1, batch=8)
        return train_draft_head(
            folder / "bundle", "medusa", [folder / "text.txt"], settings=settings, model=model
        )

    def adding(folder: Path) -> object:
        return add_draft_heads(folder / "bundle", source / "bundle", model=model)

    def trained(folder: Path) -> bytes:
        opened = Bundle(folder / "bundle")
        opened.verify()
        return opened.draft_heads()["medusa"].digest.encode()

    return {
        "port": Job(porting, lambda folder: Bundle(folder / "out").digest.encode()),
        "sweep": Job(sweeping, swept),
        "lab run": Job(experimenting, learned),
        "train-head": Job(training, trained),
        "add-head": Job(adding, trained),
    }


def silent(*_: object) -> None:
    """No progress."""


def prepare(folder: Path, bundle: Path) -> None:
    """An empty place for any job: the texts, and a copy of the bundle."""
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(TEXT)
    (folder / "small.toml").write_text(SMALL)
    (folder / "tiny.toml").write_text(EXPERIMENT.format(folder=folder))
    shutil.copytree(bundle, folder / "bundle")
