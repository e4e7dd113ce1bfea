"""The layout: blocks cut into shards, and shards into segments that run in one call."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise

from cetane.errors import CetaneError
from cetane.families import Block, Head, RoutedBlock
from cetane.schema.recipe import LayoutSection

USUAL_CHUNKS = (4, 3, 5, 6)
"""Numbers of chunks that a recipe without one may mean, the first choice first."""


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of a shard that run in one call.

    A shard has several segments if tokens are routed to experts between them.
    """

    shard: str
    suffix: str
    """The ending of its functions' names, which differs between segments of a shard."""
    blocks: tuple[Block, ...]

    @property
    def owner(self) -> str:
        """The name under which the segment's functions share caches and histories."""
        return self.shard + self.suffix

    def function(self, name: str) -> str:
        """The name of its function for a mode, for all modes (`FLEXIBLE`) or for silent calls."""
        return f"{name}{self.suffix}"

    def expert(self, index: int, name: str) -> str:
        """The name of the function of one of its experts for a mode."""
        return self.function(f"expert-{index:02}-{name}")


class Arrangement:
    """A model's blocks in the order of their calls, cut into shards and segments."""

    def __init__(
        self, layers: Sequence[Block], heads: Sequence[Head], layout: LayoutSection, source: str
    ) -> None:
        """`source` names the checkpoint in errors. Raises CetaneError for a layout that does not
        fit these blocks."""
        self.layers, self.heads = tuple(layers), tuple(heads)
        self.members = cut_into_shards(self.layers, self.heads, layout)
        """Blocks of every shard, by its name."""
        if layout.routed:
            check_routing(self.layers, source)
        self.segments = {
            shard: cut_into_segments(shard, blocks, bool(layout.routed))
            for shard, blocks in self.members.items()
        }
        """Segments of every shard, by its name."""

    @cached_property
    def order(self) -> tuple[Segment, ...]:
        """All segments, in the order of their calls."""
        return tuple(chain.from_iterable(self.segments.values()))

    def before(self, segment: Segment) -> list[Block]:
        """The blocks of earlier segments."""
        return [b for s in self.order[: self.order.index(segment)] for b in s.blocks]

    def after(self, segment: Segment) -> list[Block]:
        """The blocks of later segments."""
        return [b for s in self.order[self.order.index(segment) + 1 :] for b in s.blocks]

    def shards_before(self, shard: str) -> list[str]:
        """The names of the shards that run before this one."""
        names = list(self.members)
        return names[: names.index(shard)]


def cut_into_shards(
    layers: Sequence[Block], heads: Sequence[Head], layout: LayoutSection
) -> dict[str, tuple[Block, ...]]:
    """Blocks of every shard, by its name, in the order of their calls."""
    if layout.kind == "single":
        return {"model": (*layers, *heads)}
    whole = by_layer(layers)
    if layout.kind == "per-block":
        shards: dict[str, tuple[Block, ...]] = {block.name: (block,) for block in layers}
    elif layout.kind == "per-layer":
        shards = {f"layer-{index:02}": blocks for index, blocks in enumerate(whole)}
    else:
        bounds = chunk_bounds(layout, whole)
        shards = {
            f"chunk-{index:02}": tuple(chain.from_iterable(whole[start:stop]))
            for index, (start, stop) in enumerate(pairwise(bounds))
        }
    if layout.head == "last":
        *_, last = shards
        return shards | {last: (*shards[last], *heads)}
    return shards | {head.name: (head,) for head in heads}


def by_layer(blocks: Sequence[Block]) -> list[tuple[Block, ...]]:
    """The blocks of every layer."""
    return [tuple(group) for _, group in groupby(blocks, key=lambda block: block.layer)]


def chunk_bounds(layout: LayoutSection, whole: Sequence[tuple[Block, ...]]) -> list[int]:
    """The first layer of every chunk, then the number of layers.

    Raises CetaneError for more chunks, or later cuts, than the model has layers.
    """
    layers = len(whole)
    if layout.cuts:
        if layout.cuts[-1] >= layers:
            raise CetaneError(f"layout.cuts: {layout.cuts[-1]}, but the model has {layers} layers")
        return [0, *layout.cuts, layers]
    count = layout.chunks or usual_chunks(whole)
    if count > layers:
        raise CetaneError(f"layout.chunks = {count}: the model has {layers} layers")
    return [layers * i // count for i in range(count + 1)]


def usual_chunks(whole: Sequence[tuple[Block, ...]]) -> int:
    """About four chunks, all alike if the layers allow it: one conversion then serves them all."""
    layers = [tuple(map(likeness, blocks)) for blocks in whole]
    for count in USUAL_CHUNKS:
        size, rest = divmod(len(layers), count)
        if size and not rest and layers == layers[:size] * count:
            return count
    return min(USUAL_CHUNKS[0], len(layers))


def likeness(block: Block) -> Hashable:
    """What must be equal in two blocks for one conversion to serve both."""
    shapes = tuple((path, weight.shape, weight.kind) for path, weight in block.weights())
    return type(block), block.reads, block.writes, block.keeps, shapes


def check_routing(layers: Sequence[Block], source: str) -> None:
    """Raise CetaneError if every token needs all experts."""
    routed = [block for block in layers if isinstance(block, RoutedBlock)]
    if not routed:
        raise CetaneError(f"layout.routed: {source} has no experts")
    if not all(block.routable for block in routed):
        raise CetaneError("layout.routed: the options in [family] mix the outputs of all experts")


def cut_into_segments(shard: str, blocks: tuple[Block, ...], routed: bool) -> tuple[Segment, ...]:
    """The segments of a shard. Each block whose experts are functions of their own ends one."""
    if not routed:
        return (Segment(shard, "", blocks),)
    cuts = [0, *(i + 1 for i, b in enumerate(blocks) if isinstance(b, RoutedBlock))]
    pieces = [blocks[a:b] for a, b in pairwise([*cuts, len(blocks)]) if a < b]
    if len(pieces) == 1:
        return (Segment(shard, "", blocks),)
    return tuple(Segment(shard, f"-{index:02}", piece) for index, piece in enumerate(pieces))


def needed(blocks: Sequence[Block]) -> set[str]:
    """The tensors that blocks, in this order, read before any of them writes them."""
    wanted: set[str] = set()
    written: set[str] = set()
    for block in blocks:
        wanted |= set(block.reads) - written
        written |= set(block.writes)
    return wanted
