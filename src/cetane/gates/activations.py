"""The activations gate: a bundle against the Hugging Face model, on text outside calibration.

The bundle runs on the fast executor, in fp32: only the programs' own ops round activations.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, Seen, observe
from cetane.gates.probes import Probe, ProbePart, parts, widest_mode
from cetane.gates.quality import refuse_choices
from cetane.gates.reference import Observed, reference_of
from cetane.gates.scores import LogitScore, ShardScore, logit_score, shard_scores
from cetane.gates.verdict import Check, at_least, at_most
from cetane.planner import Planner
from cetane.schema.recipe import Mode, Quality
from cetane.validation import Data

LIMIT = limits().activations.cosine
"""The least cosine of a `Score`."""


class Score(Data):
    """The figures of a bundle, against the Hugging Face model: in its widest mode, but for
    `narrower`."""

    shards: tuple[ShardScore, ...]
    """The scores of hidden states after each shard. Shards run in a chain, so a shard's error is in
    all later ones."""
    logits: LogitScore
    perplexity: float
    narrower: tuple[LogitScore, ...] = ()
    """The logits of every other mode, on the tokens of the texts that it takes itself. Each mode is
    a function of its own, and its activations are rounded anew."""

    @property
    def cosine(self) -> float:
        """The smallest mean cosine of a shard's hidden states or of the logits, in any mode. Logits
        count since heads are quantized too, and a layout may hand on no hidden state."""
        logits = [score.cosine for score in (self.logits, *self.narrower)]
        return min([score.cosine for score in self.shards] + logits)


class ActivationScores(Data):
    """Bundles by name, and the model that they are compared with."""

    tokens: int
    """The number of predicted tokens."""
    reference_perplexity: float
    bundles: dict[str, Score]


@dataclass(frozen=True)
class JudgedTexts:
    """What a bundle made of the texts."""

    mode: Mode
    """The widest."""
    planner: Planner
    whole: list[Observed]
    """Its results in the widest mode, by text."""
    narrower: list[tuple[ProbeTask, Seen]]
    """Its results in the other modes."""
    tokens: Array
    """The tokens of its head, int `(n,)`."""

    def in_narrower_modes(self, truths: Mapping[Probe, Observed]) -> Iterator[LogitScore]:
        """The scores of the logits in every mode but the widest."""
        for mode in dict.fromkeys(task.mode for task, _ in self.narrower):
            pairs = [(task, seen) for task, seen in self.narrower if task.mode == mode]
            ours = [Observed(seen.logits, {}) for _, seen in pairs]
            theirs = [Observed(truths[task.probe].logits[seen.at], {}) for task, seen in pairs]
            yield logit_score(mode, ours, theirs, self.tokens)


def judge(
    bundles: dict[str, Bundle],
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> ActivationScores:
    """Score bundles of one checkpoint, by name, on token ids of texts that each fit the context.

    Raises CetaneError for a bundle whose head gives only choices."""
    progress("the model", 0, len(bundles) + 1)
    probes = [Probe(f"text-{index}", tuple(text)) for index, text in enumerate(texts)]
    observed: dict[str, JudgedTexts] = {}
    for index, (name, bundle) in enumerate(bundles.items()):
        progress(name, index, len(bundles) + 1)
        plan = bundle.plan
        refuse_choices(bundle)
        mode = widest_mode(plan)
        engine = Engine(plan, PortableBackend(bundle), bundle.tables(), resident=False)
        planner = Planner(checkpoint, plan.recipe)
        tasks = [ProbeTask(mode, probe, (ProbePart(mode, len(probe.tokens)),)) for probe in probes]
        others = [
            ProbeTask(other, probe, parts(plan, other, len(probe.tokens)))
            for other in plan.modes
            if other != mode
            for probe in probes
        ]
        seen = observe(engine, planner, [*tasks, *others])
        whole = [one.whole(len(task.probe.tokens)) for one, task in zip(seen, tasks, strict=False)]
        narrower = list(zip(others, seen[len(tasks) :], strict=True))
        observed[name] = JudgedTexts(mode, planner, whole, narrower, engine.plan.choosable)
    progress("the model", len(bundles), len(bundles) + 1)
    handed = {truth for own in observed.values() for one in own.whole for truth in one.tensors}
    truths = reference_of(checkpoint).run([probe.tokens for probe in probes], list(handed))
    progress("done", len(bundles) + 1, len(bundles) + 1)
    scores = {}
    by_probe = dict(zip(probes, truths, strict=True))
    for name, own in observed.items():
        scaled = [one.scaled(own.planner.model.residual_scale or 1.0) for one in truths]
        scores[name] = Score(
            shards=tuple(shard_scores(own.planner, own.mode, own.whole, scaled)),
            logits=logit_score(own.mode, own.whole, truths, own.tokens),
            perplexity=text_perplexity(own.whole, texts),
            narrower=tuple(own.in_narrower_modes(by_probe)),
        )
    return ActivationScores(
        tokens=sum(len(text) - 1 for text in texts),
        reference_perplexity=text_perplexity(truths, texts),
        bundles=scores,
    )


def judge_score(scores: ActivationScores, name: str, quality: Quality) -> Iterator[Check]:
    """The checks of a bundle by its name: its least cosine, and the promise of its recipe."""
    score, promised = scores.bundles[name], limits().quality[quality]
    ratio = score.perplexity / scores.reference_perplexity
    yield at_least("least mean cosine", score.cosine, LIMIT)
    yield at_most(f"{quality}: KL", score.logits.kl, promised.kl)
    yield at_most(f"{quality}: perplexity ratio", ratio, promised.perplexity_ratio)


def text_perplexity(observed: Sequence[Observed], texts: Sequence[Sequence[int]]) -> float:
    """The perplexity of the texts, each predicted from its own start."""
    return metrics.perplexity(
        [
            metrics.losses(metrics.log_softmax(one.logits[:-1]), np.asarray(text[1:]))
            for one, text in zip(observed, texts, strict=True)
        ]
    )
