"""What the gates of folders for other runtimes share: the bundle's logits, and what is asked."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cetane.engine.engine import Engine
from cetane.gates import metrics
from cetane.gates.limits import limits
from cetane.gates.verdict import Check, at_least, at_most

Array = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]
ROUNDED = 2.0**-10
"""The relative error that numbers of a program may cause, since they are rounded to fp16. A softcap
multiplies by 1/30, which is 0.00024 off."""


class Span(NamedTuple):
    """Tokens of a text, whose logits are compared: from number `start` up to `stop`."""

    start: int
    stop: int
    first: int = 0
    """The position of the text's first token, with nothing before it."""


def bundle_logits(engine: Engine, tokens: Sequence[int], spans: Sequence[Span]) -> list[Array]:
    """The logits of a bundle's engine after each token of every span."""
    logits = []
    for start, stop, first in spans:
        session = engine.session(start=first)
        if start:
            session.feed(tokens[:start], "none")
        made = session.feed(tokens[start:stop], "all")
        assert made is not None
        logits.append(made)
    return logits


def choice_check(where: str, choices: Numbers, truth: Array) -> Check:
    """Whether a folder chooses the bundle's tokens, or nearly as likely ones."""
    cost = truth.max(axis=1) - truth[np.arange(len(truth)), choices]
    others = int((cost > limits().evidence.margin).sum())
    return at_most(f"{where}: other tokens", others, limits().fp16.other_choices)


def logit_checks(where: str, logits: Array, truth: Array) -> list[Check]:
    """Whether a folder gives the bundle's logits, both `(n, V)`."""
    half = limits().fp16
    cosine = float(metrics.cosine(logits, truth).min())
    return [
        at_least(f"{where}: least cosine", cosine, half.logit_cosine),
        at_most(f"{where}: largest KL", float(metrics.divergence(logits, truth).max()), half.kl),
    ]


def chosen_logits_check(where: str, logits: Array, choices: Numbers, truth: Array) -> Check:
    """Whether the logits `(n,)` of some choices are the bundle's, where no others are given.

    The error is the largest one, relative to the bundle's largest logit."""
    wanted = truth[np.arange(len(truth)), choices]
    error = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
    return at_most(f"{where}: error of the chosen logits", error, ROUNDED)
