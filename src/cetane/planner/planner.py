"""The planner: resolves a recipe against a model into a plan, and into graphs to lower.

It reads shapes from modules on torch's meta device, and no weights.
"""

from collections.abc import Iterator, Mapping
from typing import Protocol

from cetane.checkpoint import RotatedCheckpoint
from cetane.errors import CetaneError
from cetane.families import Block, CacheSpec, Head, Model, RoutedBlock, Shard, Truth, author
from cetane.planner.calls import Calls, Parts
from cetane.planner.graphs import FunctionGraph, Graphs
from cetane.planner.layout import Arrangement, Segment
from cetane.planner.memory import CachePlan
from cetane.planner.nearest import refuse_unknown
from cetane.planner.truths import makers, shard_feeds, step_truths
from cetane.planner.weights import (
    ModelSource,
    check_layers,
    check_weights,
    format_of,
    mean_bits,
    weight_bytes,
)
from cetane.schema.function import ModePlan, Route, ShardPlan, Step, TablePlan
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode, Recipe
from cetane.schema.slots import Slots

CONTEXTS = (512, 1024, 2048, 4096, 8192)
"""Context lengths for which a plan states the cache's size, beside the recipe's context."""


class Programs(Protocol):
    """Shards as functions that can be traced: the part of a planner that lowering uses."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def members(self) -> Mapping[str, tuple[Block, ...]]:
        """Blocks of every shard."""

    def graphs(self, shard: str) -> list[FunctionGraph]:
        """Every function of a shard."""

    def widest(self, shard: str) -> list[FunctionGraph]:
        """The same functions, at the largest number of tokens that a flexible shape takes. Static
        functions are the same."""

    def module(self, graph: FunctionGraph) -> Shard:
        """The torch module of a function."""


class Planner:
    """Resolves one recipe for one checkpoint, and keeps the blocks that builds and engines use."""

    cache_plan: type[CachePlan] = CachePlan
    """The class that decides how calls read and write caches; another runtime has its own."""

    def __init__(
        self, checkpoint: ModelSource, recipe: Recipe, like: "Planner | None" = None
    ) -> None:
        """`like` is a planner of the same checkpoint, with which this one shares blocks and checks
        as far as the recipes agree. Raises CetaneError for a recipe that does not fit."""
        if recipe.compression.rotate and not isinstance(checkpoint, RotatedCheckpoint):
            raise CetaneError("compression.rotate: the checkpoint was not turned (planner.turned)")
        self.checkpoint, self.recipe = checkpoint, recipe
        refuse_unknown(checkpoint)
        check_layers(checkpoint)
        shared = like if like is not None and same_blocks(like.recipe, recipe) else None
        self.authored: Model = self._author() if shared is None else shared.authored
        self.model = self.authored.with_lookup() if recipe.embedding.inside else self.authored
        if recipe.cache.context > self.model.max_context:
            raise CetaneError(
                f"cache.context = {recipe.cache.context}: {checkpoint.source} was trained for "
                f"{self.model.max_context} positions"
            )
        self.memory = self.cache_plan(self.model, recipe, checkpoint.source)
        self.heads = self._make_heads()
        self.arrangement = Arrangement(
            self.model.layers, self.heads, recipe.layout, checkpoint.source
        )
        self._parts: dict[RoutedBlock, Parts] = {} if shared is None else shared._parts
        self.calling = Calls(self.model, recipe, self.arrangement, self._parts)
        self.functions = Graphs(
            self.model, recipe.head.choose, self.arrangement, self.memory, self.calling
        )
        if shared is None or shared.recipe.compression != recipe.compression:
            check_weights(checkpoint, self.model, self.blocks, recipe.compression)

    def _author(self) -> Model:
        """The model's blocks, made for this recipe."""
        recipe = self.recipe
        bits = None
        if recipe.lowering.split_contracting:
            bits = lambda weight: format_of(weight, recipe.compression).bits  # noqa: E731
        checkpoint = self.checkpoint
        return author(checkpoint.config, recipe.tensor_layout, recipe.family, checkpoint, bits)

    def _make_heads(self) -> list[Head]:
        recipe = self.recipe
        subset = recipe.head.subset
        if subset is not None and subset.vocabulary != self.model.vocab:
            raise CetaneError(
                f"head.subset: of {subset.vocabulary} tokens, but {self.checkpoint.source} has "
                f"{self.model.vocab}",
                "cetane vocabulary makes one for a model",
            )
        return self.model.heads(recipe.head.slices, None if subset is None else subset.ids)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, the head's included."""
        return (*self.model.layers, *self.heads)

    @property
    def members(self) -> Mapping[str, tuple[Block, ...]]:
        """Blocks of every shard, by shard name, in the order of their calls."""
        return self.arrangement.members

    @property
    def segments(self) -> Mapping[str, tuple[Segment, ...]]:
        """Segments of every shard."""
        return self.arrangement.segments

    @property
    def slots(self) -> Mapping[str, Slots]:
        """Slots of every cache group."""
        return self.memory.slots

    def caches(self, segment: Segment, tokens: int) -> tuple[CacheSpec, ...]:
        """The cache groups of a segment, for a call of `tokens` tokens."""
        return self.memory.caches(segment, tokens)

    def graphs(self, shard: str) -> list[FunctionGraph]:
        """Every function of a shard."""
        return [
            graph
            for segment in self.segments[shard]
            for name, tokens in self.calling.widths.items()
            for graph in self.functions.of_segment(segment, name, tokens)
        ]

    def widest(self, shard: str) -> list[FunctionGraph]:
        """The same functions at the largest number of tokens that a flexible shape takes."""
        if self.recipe.tokens.shapes == "static":
            return self.graphs(shard)
        most = max(self.recipe.tokens.by_mode().values())
        return [
            self.functions.graph(s, f"main{s.suffix}", most, s.blocks, self.arrangement.after(s))
            for s in self.segments[shard]
        ]

    def module(self, graph: FunctionGraph) -> Shard:
        """The torch module of a function; its blocks are shared."""
        return Shard(
            self.model,
            graph.blocks,
            graph.caches,
            graph.histories,
            graph.function.inputs,
            graph.function.outputs,
        )

    def calls(self, mode: Mode) -> Iterator[tuple[Segment, tuple[Block, ...], int]]:
        """The segment and blocks of every call of a mode, in order, and the number of them that a
        token is routed to; 0 if it is not routed."""
        for segment in self.arrangement.order:
            routed = self.calling.routed(segment, mode)
            for index, blocks in enumerate(self.calling.step_blocks(segment, mode)):
                yield segment, blocks, routed.chosen if routed is not None and index == 1 else 0

    def truths(self, mode: Mode) -> dict[Step | Route, dict[str, Truth]]:
        """The truths of every step's outputs in a mode, by output name.

        A truth is the tensor of the Hugging Face model that an output should equal.
        """
        return step_truths(self.model, self.arrangement, self.calling, mode)

    def feeds(self, shard: str) -> dict[str, Truth]:
        """The truths of the tensors that a shard takes from earlier shards, by tensor name."""
        return shard_feeds(self.arrangement, shard)

    def makers(self, shard: str) -> list[str]:
        """The earlier shards that make this shard's inputs without a truth."""
        return makers(self.arrangement, shard)

    def plan(self) -> Plan:
        """The whole plan."""
        recipe, model = self.recipe, self.model
        shards = tuple(self._shard(name, blocks) for name, blocks in self.members.items())
        contexts = {c for c in CONTEXTS if c <= model.max_context} | {recipe.cache.context}
        order, context = self.arrangement.order, recipe.cache.context
        tables = self._tables()
        return Plan(
            architecture=str(self.checkpoint.config["model_type"]),
            recipe=recipe,
            hidden=model.hidden,
            vocab=model.vocab,
            layers=len({block.layer for block in model.layers}),
            embedding_bytes=sum(
                t.rows * (t.channels + 2 if recipe.embedding.quantized else 2 * t.channels)
                for t in tables.values()
            ),
            weight_bytes=sum(shard.weight_bytes for shard in shards),
            mean_bits=mean_bits(self.blocks, recipe.compression),
            kv_bytes={length: self.memory.nbytes(order, length) for length in sorted(contexts)},
            kv_padding=self.memory.nbytes(order, context) - self.memory.own_nbytes(context),
            caches=dict(self.slots),
            softcap=model.softcap,
            tables=tables,
            rotary=tuple(model.rotary),
            shards=shards,
            modes={
                mode: ModePlan(
                    tokens=tokens,
                    steps=tuple(s for part in order for s in self.calling.steps(part, mode)),
                    silent=tuple(
                        s for part in order for s in self.calling.silent_steps(part, mode)
                    ),
                )
                for mode, tokens in recipe.tokens.by_mode().items()
            },
        )

    def _tables(self) -> dict[str, TablePlan]:
        """The tables that the host keeps, with a row for each token."""
        tables = {
            name: TablePlan(rows=table.rows, channels=table.channels)
            for name, table in self.model.tables.items()
        }
        if not self.recipe.embedding.inside:
            tables["tokens"] = TablePlan(rows=self.model.vocab, channels=self.model.hidden)
        return tables

    def _shard(self, name: str, blocks: tuple[Block, ...]) -> ShardPlan:
        kinds = {isinstance(block, Head) for block in blocks}
        return ShardPlan(
            name=name,
            kind="model" if len(kinds) == 2 else "head" if kinds == {True} else "layers",
            blocks=tuple(block.name for block in blocks),
            weight_bytes=weight_bytes(blocks, self.recipe.compression),
            functions=tuple(graph.function for graph in self.graphs(name)),
        )


def same_blocks(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes for a checkpoint have the same blocks.

    With `lowering.split_contracting`, the bits of weights decide which projections are split.
    """
    split = one.lowering.split_contracting or other.lowering.split_contracting
    keys = ["tensor_layout", "family", *(["lowering", "compression"] if split else [])]
    return all(getattr(one, key) == getattr(other, key) for key in keys)
