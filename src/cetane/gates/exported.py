"""What the gates of folders for other runtimes share: the bundle's logits, and what is asked."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cetane.bundle import Bundle
from cetane.bundle.tables import Tables
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
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


def bundle_logits(
    bundle: Bundle, tables: Tables, tokens: Sequence[int], spans: Sequence[Span]
) -> list[Array]:
    """The logits of the bundle after each token of every span, in fp32."""
    engine, logits = Engine(bundle.plan, PortableBackend(bundle), tables), []
    for start, stop, first in spans:
        session = engine.session(start=first)
        if start:
            session.feed(tokens[:start], "none")
        made = session.feed(tokens[start:stop], "all")
        assert made is not None
        logits.append(made)
    return logits


def choice_check(
    bundle: Bundle, where: str, choices: Numbers, truth: Array, anew: bool = False
) -> Check:
    """Whether a folder chooses the bundle's tokens, or nearly as likely ones.

    `anew`: some of its weights have other codes than the bundle's. Then the recipe's promise is the
    limit."""
    count, evidence = len(truth), limits().evidence
    cost = truth.max(axis=1) - truth[np.arange(count), choices]
    promised = limits().quality[bundle.plan.recipe.quality]
    most = round((1 - promised.greedy) * count) if anew else limits().fp16.other_choices
    return at_most(f"{where}: other tokens", int((cost > evidence.margin).sum()), most)


def logit_checks(
    bundle: Bundle, where: str, logits: Array, truth: Array, anew: bool
) -> list[Check]:
    """Whether a folder gives the bundle's logits, both `(n, V)`; `anew` as in `choice_check`."""
    half, kl = limits().fp16, metrics.divergence(logits, truth)
    if anew:
        promised = limits().quality[bundle.plan.recipe.quality]
        return [at_most(f"{where}: mean KL", float(kl.mean()), promised.kl)]
    cosine = float(metrics.cosine(logits, truth).min())
    return [
        at_least(f"{where}: least cosine", cosine, half.logit_cosine),
        at_most(f"{where}: largest KL", float(kl.max()), half.kl),
    ]


def chosen_logits_check(where: str, logits: Array, choices: Numbers, truth: Array) -> Check:
    """Whether the logits `(n,)` of some choices are the bundle's, where no others are given.

    The error is the largest one, relative to the bundle's largest logit."""
    wanted = truth[np.arange(len(truth)), choices]
    error = float(np.abs(logits - wanted).max() / np.abs(wanted).max())
    return at_most(f"{where}: error of the chosen logits", error, ROUNDED)
