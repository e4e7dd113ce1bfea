"""The published ports' validator: judges one shard at a time (ane-book, experiments 30, 31 and 35).

Each shard gets the tensors that the Hugging Face model computes before it. This gate sees no error
that grows from shard to shard, and a mean of cosines hides a wrong token. The golden gate is the
proof; this gate finds a wrong shard in seconds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.tables import TokenRows
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import embedding_rows
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.ladder import rungs
from cetane.gates.limits import limits
from cetane.gates.probes import SEED, SMALL, random_tokens, row_norms
from cetane.planner import Planner
from cetane.validation import Data

DRAWN = 8
"""The tokens of a random probe."""


class ProbedShard(Data):
    """The score of a shard's outputs, over all probes, adapters, capacities, modes and tokens."""

    shard: str
    passed: bool
    mean: float
    """The mean cosine of its output with the model's."""
    min: float
    """The smallest cosine of any token."""


class Screened(Data):
    """A token that is left out of a probe."""

    token: int
    reason: str


class LayersResult(Data):
    """The validator's verdict on these shards."""

    passed: bool
    limit: float
    shards: tuple[ProbedShard, ...]
    probes: tuple[tuple[int, ...], ...]
    screened: tuple[Screened, ...]
    source: str = ""
    """The checkpoint's path, URL or hub id; empty in older results."""
    fingerprint: str = ""
    """The checkpoint's fingerprint."""
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json") | {"line": self.line}

    @property
    def line(self) -> str:
        """The last line, in the form of the published validator."""
        good = sum(score.passed for score in self.shards)
        mean = float(np.mean([score.mean for score in self.shards]))
        least = min(score.min for score in self.shards)
        said = "PASS" if self.passed else "FAIL"
        return f"{said} {good}/{len(self.shards)}, mean {mean:.6f}, min {least:.6f}"


def judge_layers(
    bundle: Bundle,
    checkpoint: Checkpoint,
    block: int | None,
    prompt_ids: tuple[int, ...],
    count: int,
    progress: Progress,
) -> LayersResult:
    """Judge the shard of a block, by the block's number in the model, or all shards with layers.

    The probe is the user's ids that pass `screen`. Without ids, `count` random sequences of `DRAWN`
    tokens are the probes. Raises CetaneError for an unknown block, and for ids that the model lacks
    or the context cannot hold.
    """
    planner = Planner(checkpoint, bundle.plan.recipe)
    probes, screened = choose_probes(bundle, embedding_rows(planner, checkpoint), prompt_ids, count)
    backend = PortableBackend(bundle, "fp16")  # rounds every result
    engine = Engine(bundle.plan, backend, bundle.tables(), resident=False)
    modes = list(bundle.plan.modes)
    shards, limit = chosen(planner, block), limits().published.cosine
    cosines: dict[str, list[Array]] = {shard: [] for shard in shards}
    steps = len(probes) * len(shards)
    for number, probe in enumerate(probes):
        for rung in rungs(engine, planner, checkpoint, probe):  # each may load another reference
            for done, shard in enumerate(shards, number * len(shards)):
                progress(shard, done, steps)
                for pair in rung.pairs(shard, modes):
                    cosines[shard].append(metrics.cosine(pair.ours, pair.wanted))
    progress("done", steps, steps)
    scores = []
    for shard, parts in cosines.items():
        rows = np.concatenate(parts)
        least, mean = float(rows.min()), float(rows.mean())
        scores.append(ProbedShard(shard=shard, passed=least >= limit, mean=mean, min=least))
    return LayersResult(
        passed=all(score.passed for score in scores),
        limit=limit,
        shards=tuple(scores),
        probes=tuple(probes),
        screened=tuple(screened),
    )


def choose_probes(
    bundle: Bundle, rows: TokenRows, prompt_ids: tuple[int, ...], count: int
) -> tuple[list[tuple[int, ...]], list[Screened]]:
    """The probes, and the user's tokens that are left out of them."""
    tokenizer, context = bundle.tokenizer, bundle.plan.recipe.cache.context
    if len(prompt_ids) > context:
        raise CetaneError(
            f"--prompt-ids: {len(prompt_ids)} tokens, but the context holds {context}",
            "give fewer ids",
        )
    if prompt_ids:
        probe, screened = screen(prompt_ids, rows, tokenizer.bos_id)
        return [probe], screened
    excluded = {*tokenizer.eos_ids, tokenizer.bos_id or 0}
    return [random_tokens(rows, DRAWN, SEED + number, excluded) for number in range(count)], []


def chosen(planner: Planner, block: int | None) -> list[str]:
    """The shards with layers, or the shard of a block. Raises CetaneError for an unknown block."""
    blocks = planner.model.layers
    if block is not None and not 0 <= block < len(blocks):
        raise CetaneError(
            f"--layer {block}: the model has the blocks 0 to {len(blocks) - 1}",
            "attention and experts of a layer are two blocks where the plan tells them apart",
        )
    wanted = blocks if block is None else blocks[block : block + 1]
    return [
        shard
        for shard, members in planner.members.items()
        if any(member.root is own for member in members for own in wanted)
    ]


def screen(
    ids: Sequence[int], embedding: TokenRows, bos: int | None
) -> tuple[tuple[int, ...], list[Screened]]:
    """The user's ids that can judge a shard, and the others with reasons.

    Raises CetaneError for ids that the model lacks, and if none is left.
    """
    count = embedding.shape[0]
    for token in ids:
        if not 0 <= token < count:
            raise CetaneError(f"--prompt-ids: {token}: the model has the tokens 0 to {count - 1}")
    norms = row_norms(embedding)
    least = float(np.percentile(norms, SMALL))
    left_out = []
    for token in dict.fromkeys(ids):
        if token == bos and token == ids[0]:
            reason = "BOS first exaggerates the rounding of keys and values after it"
        elif norms[token] < least:
            reason = (
                f"its embedding has a norm of {norms[token]:.3g}, and {100 - SMALL:g} % of all "
                f"tokens have more than {least:.3g}: beside these it exaggerates rounding"
            )
        else:
            continue
        left_out.append(Screened(token=token, reason=reason))
    dropped = {one.token for one in left_out}
    kept = tuple(token for token in ids if token not in dropped)
    if not kept:
        said = "; ".join(f"{one.token}: {one.reason}" for one in left_out)
        raise CetaneError(
            f"--prompt-ids: no token is left to judge a shard on: {said}", "give other ids"
        )
    return kept, left_out
