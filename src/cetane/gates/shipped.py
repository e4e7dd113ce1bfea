"""The port as it ships against the model, over windows of text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cetane.engine.backend import Array
from cetane.gates import metrics
from cetane.gates.golden_result import Range
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import Seen
from cetane.gates.probes import LEAST_OWN, Probe
from cetane.gates.quality import Agreement
from cetane.gates.reference import Observed
from cetane.gates.scores import LogitScore, ShardScore, logit_score, shard_scores
from cetane.gates.verdict import Check
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

UNPROVEN = "{} was not judged, only KL and perplexity: the model is sure of too few tokens"


@dataclass(frozen=True)
class Text:
    """Windows of text, and the twin's logits for each."""

    windows: list[Probe]
    logits: list[Array]
    peak: int = 0
    """The number of its token whose tensors are the largest."""


@dataclass(frozen=True)
class Compressed:
    """The figures of a port's compression, as in `GoldenResult`."""

    checks: tuple[Check, ...]
    shards: tuple[ShardScore, ...]
    logits: tuple[LogitScore, ...]
    ranges: tuple[Range, ...]
    positions: int
    twin_kl: float
    model_perplexity: float
    """The compared model's own, on the text."""
    warnings: tuple[str, ...] = ()


class Compression:
    """The shipped port against the model, over windows of text. Holds the logits of both."""

    def __init__(self, plan: Plan, planner: Planner, mode: Mode) -> None:
        self.plan, self.planner, self.mode = plan, planner, mode
        self.agreement = Agreement(plan.recipe, plan.choosable, plan.vocab)
        self.seen: list[Observed] = []
        self.truths: list[Observed] = []
        self.largest: dict[str, float] = {}
        self.twin_kl = 0.0

    def add(self, windows: Sequence[Probe], seen: Sequence[Seen], truths: ModelResults) -> None:
        """Judge more windows."""
        for window, ours in zip(windows, seen, strict=True):
            theirs = truths.of(window)
            count = len(window.tokens)
            logits = truths.logits(window, ours.at)
            self.agreement.add(ours.logits[:-1], logits[:-1], np.asarray(window.tokens[1:]))
            self.seen.append(ours.whole(count))
            self.truths.append(Observed(logits, theirs.tensors))
            self.reach(theirs)

    def reach(self, truth: Observed) -> None:
        """Note how large the residual stream of a sequence becomes."""
        for block in self.planner.model.layers:
            for stream in block.residuals():
                top = float(np.abs(truth.tensors[stream]).max())
                self.largest[block.name] = max(self.largest.get(block.name, 0.0), top)

    @property
    def checks(self) -> tuple[Check, ...]:
        return tuple(self.agreement.judge(self.plan.recipe))

    @property
    def decided(self) -> bool:
        """Whether the interval of every share excludes its limit."""
        return all(check.decided for check in self.checks)

    @property
    def unproven(self) -> list[Check]:
        """Shares that fail though no position disagrees: there are too few positions.

        A head that only chooses has none, since nothing else judges it."""
        shares = [] if self.plan.recipe.head.choose else self.checks
        return [
            one
            for one in shares
            if one.interval and not one.passed and np.isclose(one.interval[1], 1)
        ]

    def result(self) -> Compressed:
        """The figures, without the logits that they are made of."""
        head, unproven = self.plan.tokens(0, self.plan.rows), self.unproven
        return Compressed(
            checks=tuple(check for check in self.checks if check not in unproven),
            warnings=tuple(UNPROVEN.format(one.name) for one in unproven),
            shards=tuple(shard_scores(self.planner, self.mode, self.seen, self.truths)),
            logits=(logit_score(self.mode, self.seen, self.truths, head),),
            ranges=tuple(Range(block=name, largest=top) for name, top in self.largest.items()),
            positions=len(self.agreement.all("kl")),
            twin_kl=self.twin_kl,
            model_perplexity=self.agreement.perplexities[1],
        )


def peak(windows: Sequence[Probe], seen: Sequence[Seen]) -> int:
    """The number of the text's token that has the largest magnitude between shards; 0 if there is
    one shard alone.

    The first tokens of a window are left out. They are large only since nothing is before them."""
    best, before = (0.0, 0), 0
    for window, one in zip(windows, seen, strict=True):
        for at, rows in one.tensors.values():
            later = at >= LEAST_OWN
            if later.any():
                tops = np.abs(rows[later]).max(axis=1)
                best = max(best, (float(tops.max()), before + int(at[later][tops.argmax()])))
        before += len(window.tokens) - 1
    return best[1]


def twin_kl(text: Text, seen: Sequence[Seen], plan: Plan) -> float:
    """The mean KL of the port from its twin, in nats; 0 for a head that gives only its choice."""
    if plan.recipe.head.choose:
        return 0.0
    tokens = plan.tokens(0, plan.rows)
    pairs = zip(seen, text.logits, strict=True)
    rows = [metrics.divergence(a.logits[:, tokens], b[:, tokens]) for a, b in pairs]
    return metrics.written(np.concatenate(rows).mean())
