"""What the outputs of a plan's calls should equal in the Hugging Face model."""

from cetane.families import Model, Truth
from cetane.planner.calls import Calls
from cetane.planner.layout import Arrangement, needed
from cetane.schema.function import Route, Step
from cetane.schema.recipe import Mode


def step_truths(
    model: Model, arrangement: Arrangement, calls: Calls, mode: Mode
) -> dict[Step | Route, dict[str, Truth]]:
    """For every step of a mode, the truth of its outputs, by output name."""
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
    """The truth of what a shard takes from earlier ones, by tensor name."""
    reads = needed(arrangement.members[shard])
    return {
        name: truth
        for earlier in arrangement.shards_before(shard)
        for block in arrangement.members[earlier]
        for name, truth in block.truths().items()
        if name in reads
    }


def makers(arrangement: Arrangement, shard: str) -> list[str]:
    """Earlier shards that make what a shard takes and no module of the Hugging Face model gives."""
    reads = needed(arrangement.members[shard])
    return [
        earlier
        for earlier in arrangement.shards_before(shard)
        if any(
            reads & set(block.writes) - set(block.truths())
            for block in arrangement.members[earlier]
        )
    ]
