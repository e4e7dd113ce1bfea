"""Truths: the tensors of the Hugging Face model that the outputs of a plan's calls should equal."""

from cetane.families import Model, Truth
from cetane.planner.calls import Calls
from cetane.planner.layout import Arrangement, needed
from cetane.schema.function import Route, Step
from cetane.schema.recipe import Mode


def step_truths(
    model: Model, arrangement: Arrangement, calls: Calls, mode: Mode
) -> dict[Step | Route, dict[str, Truth]]:
    """The truths of every step's outputs in a mode, by output name."""
    return {
        step: {
            f"{name}_out": truth
            for block in blocks
            for name, truth in block.truths().items()
            if name in model.channels
        }
        for segment in arrangement.order
        for step, blocks in zip(
            calls.steps(segment, mode), calls.step_blocks(segment, mode), strict=True
        )
    }


def shard_feeds(arrangement: Arrangement, shard: str) -> dict[str, Truth]:
    """The truths of the tensors that a shard takes from earlier shards, by tensor name."""
    reads = needed(arrangement.members[shard])
    return {
        name: truth
        for earlier in arrangement.shards_before(shard)
        for block in arrangement.members[earlier]
        for name, truth in block.truths().items()
        if name in reads
    }


def makers(arrangement: Arrangement, shard: str) -> list[str]:
    """The earlier shards that make this shard's inputs without a truth."""
    reads = needed(arrangement.members[shard])
    return [
        earlier
        for earlier in arrangement.shards_before(shard)
        if any(
            reads & set(block.writes) - set(block.truths())
            for block in arrangement.members[earlier]
        )
    ]
