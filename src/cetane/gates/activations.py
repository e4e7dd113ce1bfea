"""The activations gate: a bundle against the Hugging Face model, on text outside calibration.

The bundle runs on the fast executor, in fp32: only the programs' own ops round activations.
"""

from collections.abc import Sequence

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, observe
from cetane.gates.probes import Probe, ProbePart, widest_mode
from cetane.gates.quality import refuse_choices
from cetane.gates.reference import Observed, reference_of
from cetane.gates.scores import LogitScore, ShardScore, logit_score, shard_scores
from cetane.planner import Planner
from cetane.schema.recipe import Mode
from cetane.validation import Data

LIMIT = limits().activations.cosine
"""The least cosine of a `Score`."""


class Score(Data):
    """The figures of a bundle in its widest mode, against the Hugging Face model."""

    shards: tuple[ShardScore, ...]
    """The scores of hidden states after each shard. Shards run in a chain, so a shard's error is in
    all later ones."""
    logits: LogitScore
    perplexity: float

    @property
    def cosine(self) -> float:
        """The smallest mean cosine of a shard's hidden states or of the logits. Logits count since
        heads are quantized too, and a layout may hand on no hidden state."""
        return min([score.cosine for score in self.shards] + [self.logits.cosine])


class Scores(Data):
    """Bundles by name, and the model that they are compared with."""

    tokens: int
    """The number of predicted tokens."""
    reference_perplexity: float
    bundles: dict[str, Score]


def judge(
    bundles: dict[str, Bundle],
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> Scores:
    """Score bundles of one checkpoint, by name, on token ids of texts that each fit the context.

    Raises CetaneError for a bundle whose head gives only choices."""
    progress("the model", 0, len(bundles) + 1)
    probes = [Probe(f"text-{index}", tuple(text)) for index, text in enumerate(texts)]
    observed: dict[str, tuple[Mode, Planner, list[Observed], Array]] = {}
    for index, (name, bundle) in enumerate(bundles.items()):
        progress(name, index, len(bundles) + 1)
        plan = bundle.plan
        refuse_choices(plan, str(bundle.path))
        mode = widest_mode(plan)
        engine = Engine(plan, PortableBackend(bundle), bundle.tables(), resident=False)
        planner = Planner(checkpoint, plan.recipe)
        tasks = [ProbeTask(mode, probe, (ProbePart(mode, len(probe.tokens)),)) for probe in probes]
        seen = observe(engine, planner, tasks)
        whole = [one.whole(len(probe.tokens)) for one, probe in zip(seen, probes, strict=True)]
        observed[name] = mode, planner, whole, engine.plan.choosable
    progress("the model", len(bundles), len(bundles) + 1)
    handed = {truth for _, _, seen, _ in observed.values() for one in seen for truth in one.tensors}
    truths = reference_of(checkpoint).run([probe.tokens for probe in probes], list(handed))
    progress("done", len(bundles) + 1, len(bundles) + 1)
    scores = {}
    for name, (mode, planner, own, tokens) in observed.items():
        scaled = [one.scaled(planner.model.residual_scale or 1.0) for one in truths]
        scores[name] = Score(
            shards=tuple(shard_scores(planner, mode, own, scaled)),
            logits=logit_score(mode, own, truths, tokens),
            perplexity=text_perplexity(own, texts),
        )
    return Scores(
        tokens=sum(len(text) - 1 for text in texts),
        reference_perplexity=text_perplexity(truths, texts),
        bundles=scores,
    )


def text_perplexity(observed: Sequence[Observed], texts: Sequence[Sequence[int]]) -> float:
    """The perplexity of the texts, each predicted from its own start."""
    return metrics.perplexity(
        [
            metrics.losses(metrics.log_softmax(one.logits[:-1]), np.asarray(text[1:]))
            for one, text in zip(observed, texts, strict=True)
        ]
    )
