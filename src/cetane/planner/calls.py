"""The calls of a mode: which function of which shard runs, on which blocks, and where a token goes
to one expert."""

from collections.abc import Iterator
from functools import cached_property

from cetane.families import Block, Head, Model, Part, RoutedBlock
from cetane.planner.layout import Arrangement, Segment
from cetane.schema.function import Route, Step
from cetane.schema.recipe import Mode, Recipe

Parts = tuple[Part, tuple[Part, ...]]
"""The router and the experts of a block."""


class Calls:
    """The steps and routes of every mode.

    Prompts are read without their logits, but for the last token. These *silent* calls leave out
    the head, and layers that only it depends on: those that read others' caches and keep none.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        arrangement: Arrangement,
        parts: dict[RoutedBlock, Parts],
    ) -> None:
        """`parts` keeps the parts of routed blocks, for planners that share blocks."""
        self.model, self.recipe, self.arrangement = model, recipe, arrangement
        self._parts = parts

    @cached_property
    def widths(self) -> dict[str, int]:
        """Tokens per call by function name: one function per mode, or one `main` that a flexible
        shape makes fit all modes."""
        if self.recipe.tokens.shapes == "range":
            return {"main": 1}
        return {str(mode): tokens for mode, tokens in self.recipe.tokens.by_mode().items()}

    def parts(self, block: RoutedBlock) -> Parts:
        """The router and the experts of a block, made once."""
        if block not in self._parts:
            self._parts[block] = block.router(), block.experts()
        return self._parts[block]

    def routed(self, segment: Segment, mode: str) -> RoutedBlock | None:
        """The last block of a segment, if its experts are called one by one in a mode."""
        last = segment.blocks[-1]
        return last if isinstance(last, RoutedBlock) and mode in self.recipe.layout.routed else None

    def steps(self, segment: Segment, mode: Mode) -> Iterator[Step | Route]:
        """The calls of a segment."""
        name = "main" if "main" in self.widths else mode
        yield Step(shard=segment.shard, function=f"{name}{segment.suffix}")
        block = self.routed(segment, mode)
        if block is not None:
            modes = sorted(self.recipe.layout.routed, key=lambda m: self.widths[m])
            yield Route(
                shard=segment.shard,
                scores=block.scores,
                experts=tuple(
                    tuple(f"expert-{index:02}-{m}{segment.suffix}" for m in modes)
                    for index in range(len(self.parts(block)[1]))
                ),
            )

    def step_blocks(self, segment: Segment, mode: Mode) -> list[tuple[Block, ...]]:
        """The blocks behind each of `steps`."""
        block = self.routed(segment, mode)
        if block is None:
            return [segment.blocks]
        router, experts = self.parts(block)
        return [(*segment.blocks[:-1], router), experts]

    def silent_steps(self, segment: Segment, mode: Mode) -> Iterator[Step | Route]:
        """The calls of a segment that run where no logits are wanted."""
        if "main" not in self.widths and self.fills(segment, mode):
            yield Step(shard=segment.shard, function=f"fill{segment.suffix}")
        elif self.silent(segment):
            yield from self.steps(segment, mode)

    def silent(self, segment: Segment) -> tuple[Block, ...]:
        """The blocks of a segment that run where no logits are wanted."""
        return tuple(block for block in segment.blocks if block in self.filling)

    @cached_property
    def filling(self) -> frozenset[Block]:
        """The blocks that fill caches and histories, or that such a block depends on: all layers,
        unless some read others' caches."""
        if not self.model.shared:
            return frozenset(self.arrangement.layers)
        wanted: set[str] = set()
        live = set()
        for block in reversed([b for segment in self.arrangement.order for b in segment.blocks]):
            if block.keeps or wanted & set(block.writes):
                live.add(block)
                wanted = wanted - set(block.writes) | set(block.reads)
        return frozenset(live)

    def fills(self, segment: Segment, mode: str) -> bool:
        """Whether a segment has a function of its own for silent calls: in prefill, where only some
        of its layers run in them."""
        layers = [block for block in segment.blocks if not isinstance(block, Head)]
        some = 0 < len(self.silent(segment)) < len(layers)
        return mode == "prefill" and bool(self.model.shared) and some
