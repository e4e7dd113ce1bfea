"""The calls of a mode: steps, each with its blocks, and routes, which send tokens to experts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from cetane.families import Block, Head, Model, Part, RoutedBlock
from cetane.planner.layout import Arrangement, Segment, needed
from cetane.schema.function import Route, Step
from cetane.schema.recipe import Mode, Recipe

Parts = tuple[Part, tuple[Part, ...]]
"""The router and the experts of a block."""
FLEXIBLE, FILL = "main", "fill"
"""Names of functions: the only one of flexible shapes, and one for silent calls. Others are named
after their mode."""


@dataclass(frozen=True)
class BlockCall:
    """A call of a mode, by its blocks."""

    segment: Segment
    blocks: tuple[Block, ...]
    routed: int
    """The number of these blocks that a token is routed to, 0 without routing."""
    shared: frozenset[str]
    """The keys and values of the model's `shared` that it takes from other calls or gives to
    them."""


class Calls:
    """The steps and routes of every mode.

    Calls for prompt tokens need no logits, except for the last token. Such *silent* calls leave out
    the head, and layers that only the head depends on. Such layers read others' caches and keep
    none.
    """

    def __init__(
        self,
        model: Model,
        recipe: Recipe,
        arrangement: Arrangement,
        parts: dict[RoutedBlock, Parts],
    ) -> None:
        """`parts` holds the parts of routed blocks, shared by planners that share blocks."""
        self.model, self.recipe, self.arrangement = model, recipe, arrangement
        self._parts = parts

    @cached_property
    def widths(self) -> dict[str, int]:
        """Tokens per call by function name: one function per mode, or one flexible function
        for all."""
        if self.recipe.tokens.shapes == "range":
            return {FLEXIBLE: 1}
        return {str(mode): tokens for mode, tokens in self.recipe.tokens.by_mode().items()}

    def parts(self, block: RoutedBlock) -> Parts:
        """The router and the experts of a block, made once."""
        if block not in self._parts:
            self._parts[block] = block.router(), block.experts()
        return self._parts[block]

    def routed(self, segment: Segment, mode: str) -> RoutedBlock | None:
        """The last block of a segment, if this mode calls its experts one by one; else None."""
        last = segment.blocks[-1]
        return last if isinstance(last, RoutedBlock) and mode in self.recipe.layout.routed else None

    def steps(self, segment: Segment, mode: Mode) -> Iterator[Step | Route]:
        """The calls of a segment."""
        name = FLEXIBLE if FLEXIBLE in self.widths else mode
        yield Step(shard=segment.shard, function=segment.function(name))
        block = self.routed(segment, mode)
        if block is not None:
            modes = sorted(self.recipe.layout.routed, key=lambda m: self.widths[m])
            yield Route(
                shard=segment.shard,
                scores=block.scores,
                adds=block.adds,
                together=block.together,
                experts=tuple(
                    tuple(segment.expert(index, m) for m in modes)
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

    def calls(self, mode: Mode, silent: bool = False) -> Iterator[BlockCall]:
        """Every call of a mode, or every silent one, in order."""
        for segment in self.arrangement.order:
            block, later = self.routed(segment, mode), self.arrangement.after(segment)
            called = self.step_blocks(segment, mode)
            if silent and self.fills(segment, mode):
                called, later = [self.silent(segment)], [b for b in later if b in self.filling]
            elif silent and not self.silent(segment):
                continue
            for index, blocks in enumerate(called):
                chosen = block.chosen if block is not None and index == 1 else 0
                yield BlockCall(segment, blocks, chosen, self.crossing(blocks, later))

    def crossing(self, blocks: Sequence[Block], later: Sequence[Block]) -> frozenset[str]:
        """The shared keys and values that a call of some blocks takes, or gives to later blocks."""
        if not self.model.shared:
            return frozenset()
        written = {name for block in blocks for name in block.writes}
        given = written & needed(later)
        return frozenset(self.model.shared.keys() & (needed(blocks) | given))

    def silent_steps(self, segment: Segment, mode: Mode) -> Iterator[Step | Route]:
        """The silent calls of a segment."""
        if self.fills(segment, mode):
            yield Step(shard=segment.shard, function=segment.function(FILL))
        elif self.silent(segment):
            yield from self.steps(segment, mode)

    def silent(self, segment: Segment) -> tuple[Block, ...]:
        """The blocks of a segment that run in silent calls."""
        return tuple(block for block in segment.blocks if block in self.filling)

    @cached_property
    def filling(self) -> frozenset[Block]:
        """The blocks that fill caches and histories, and the blocks that these depend on.

        These are all layers, unless some layers read others' caches.
        """
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
        """Whether a segment has a function of its own for silent calls.

        It has one in prefill of static shapes, if silent calls run only some of its layers.
        """
        layers = [block for block in segment.blocks if not isinstance(block, Head)]
        some = 0 < len(self.silent(segment)) < len(layers)
        return mode == "prefill" and mode in self.widths and bool(self.model.shared) and some
