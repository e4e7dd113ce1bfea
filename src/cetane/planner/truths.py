"""Truths: the tensors of the Hugging Face model that the outputs of a plan's calls should equal."""

from collections.abc import Iterable

from cetane.families import Block, Model, Truth
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
            for name, block in last_writers(blocks).items()
            if name in model.channels and (truth := block.truths().get(name)) is not None
        }
        for segment in arrangement.order
        for step, blocks in zip(
            calls.steps(segment, mode), calls.step_blocks(segment, mode), strict=True
        )
    }


def last_writers(blocks: Iterable[Block]) -> dict[str, Block]:
    """The block that last writes each tensor, by name."""
    return {name: block for block in blocks for name in block.writes}


def shard_feeds(arrangement: Arrangement, shard: str) -> dict[str, Truth]:
    """The truths of the tensors that a shard takes from earlier shards, by tensor name."""
    return {
        name: truth
        for name, (_, block) in writers(arrangement, shard).items()
        if (truth := block.truths().get(name)) is not None
    }


def makers(arrangement: Arrangement, shard: str) -> list[str]:
    """The earlier shards that make this shard's inputs without a truth."""
    made = writers(arrangement, shard)
    return list(dict.fromkeys(s for n, (s, block) in made.items() if n not in block.truths()))


def writers(arrangement: Arrangement, shard: str) -> dict[str, tuple[str, Block]]:
    """The earlier shard and block that last write each tensor which a shard takes, by name."""
    reads = needed(arrangement.members[shard])
    return {
        name: (earlier, block)
        for earlier in arrangement.shards_before(shard)
        for block in arrangement.members[earlier]
        for name in block.writes
        if name in reads
    }
