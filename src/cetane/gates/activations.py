"""How near a bundle is to the Hugging Face model on text that calibration has not seen.

On the fast executor, in fp32: activations are rounded where the programs say so, and nowhere else.
"""

from collections.abc import Sequence

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.golden import LogitScore, ShardScore, logit_score, observe, shard_scores
from cetane.gates.probes import Probe
from cetane.gates.reference import Observed, Reference
from cetane.planner import Planner
from cetane.schema.recipe import Mode
from cetane.validation import Data

LIMIT = 0.95
"""Least mean cosine of a hidden state (CoreML-LLM's `docs/STAGE1_W4A8_FINAL.md`)."""


class Score(Data):
    """A bundle in its widest mode against the Hugging Face model, over all tokens."""

    shards: tuple[ShardScore, ...]
    """What shards hand on, chained: the error of a shard is in all after it."""
    logits: LogitScore
    perplexity: float

    @property
    def cosine(self) -> float:
        """The smallest of the shards' mean cosines."""
        return min(score.cosine for score in self.shards)


class Scores(Data):
    """Bundles by name, and the model that they are compared with."""

    tokens: int
    """That were predicted."""
    reference_perplexity: float
    bundles: dict[str, Score]


def judge(
    bundles: dict[str, Bundle],
    checkpoint: Checkpoint,
    texts: Sequence[Sequence[int]],
    progress: Progress,
) -> Scores:
    """Score some bundles of one checkpoint, by name, on texts that each fit the context."""
    progress("the model", 0, len(bundles) + 1)
    probes = [Probe(f"text-{index}", tuple(text)) for index, text in enumerate(texts)]
    found: dict[str, tuple[Mode, Planner, list[Observed], Array]] = {}
    for index, (name, bundle) in enumerate(bundles.items()):
        progress(name, index, len(bundles) + 1)
        plan = bundle.plan
        if plan.recipe.head.choose:
            raise CetaneError(f"{bundle.path} gives choices, not the logits that perplexity needs")
        mode: Mode = max(plan.modes, key=lambda m: plan.modes[m].tokens)
        engine = Engine(plan, PortableBackend(bundle), bundle.tables(), resident=False)
        planner = Planner(checkpoint, plan.recipe)
        seen = observe(engine, planner, [mode], probes)[mode]
        found[name] = mode, planner, seen, engine.plan.choosable
    progress("the model", len(bundles), len(bundles) + 1)
    handed = {truth for _, _, seen, _ in found.values() for one in seen for truth in one.tensors}
    truths = Reference(checkpoint).run([probe.tokens for probe in probes], list(handed))
    progress("done", len(bundles) + 1, len(bundles) + 1)
    return Scores(
        tokens=sum(len(text) - 1 for text in texts),
        reference_perplexity=perplexity(truths, texts),
        bundles={
            name: Score(
                shards=tuple(shard_scores(planner, mode, seen, truths)),
                logits=logit_score(mode, seen, truths, tokens),
                perplexity=perplexity(seen, texts),
            )
            for name, (mode, planner, seen, tokens) in found.items()
        },
    )


def perplexity(observed: Sequence[Observed], texts: Sequence[Sequence[int]]) -> float:
    """Of the texts, each predicted from its own start."""
    return metrics.perplexity(
        [
            metrics.losses(metrics.log_softmax(one.logits[:-1]), np.asarray(text[1:]))
            for one, text in zip(observed, texts, strict=True)
        ]
    )
