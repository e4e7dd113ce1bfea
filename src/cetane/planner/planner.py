"""The planner: resolves a recipe against a model into a plan, and into graphs to lower.

It reads shapes from modules on torch's meta device, and no weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Protocol, Self

from cetane.bundle.rows import ROW_FORMATS
from cetane.checkpoint import RotatedCheckpoint, streamed_part
from cetane.checkpoint.adapted import SHARED_BASE, AdapterTensor
from cetane.checkpoint.lora import Lora
from cetane.errors import CetaneError
from cetane.families import (
    Block,
    Head,
    Model,
    RoutedBlock,
    Shard,
    Truth,
    Weight,
    adapt,
    author,
    streamed,
)
from cetane.planner.calls import FLEXIBLE, BlockCall, Calls, Parts
from cetane.planner.graphs import FunctionGraph, Graphs
from cetane.planner.layout import Arrangement, Segment
from cetane.planner.memory import CachePlan
from cetane.planner.nearest import refuse_unknown
from cetane.planner.truths import makers, shard_feeds, step_truths
from cetane.planner.variants import Variants
from cetane.planner.weights import (
    ModelSource,
    adapter_bytes,
    adapters_of,
    check_layers,
    check_weights,
    format_of,
    mean_bits,
    weight_bytes,
)
from cetane.schema.function import (
    AdapterPlan,
    CapacityPlan,
    ModePlan,
    Route,
    ShardPlan,
    Step,
    TablePlan,
)
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode, Recipe
from cetane.schema.subset import Subset

STATED_CONTEXTS = (512, 1024, 2048, 4096, 8192)
"""Context lengths for which a plan states the cache's size, beside the recipe's context."""
Steps = tuple[Step | Route, ...]


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


def check_as_asked(checkpoint: ModelSource, recipe: Recipe) -> None:
    """Raise CetaneError for channels that are not turned, or heads in another order, where the
    recipe asks for that."""
    hint = "give the planner planner.as_recipe_asks(checkpoint, recipe)"
    if recipe.compression.rotate and not isinstance(checkpoint, RotatedCheckpoint):
        raise CetaneError("compression.rotate: the checkpoint's channels are not turned", hint)
    if recipe.cache.streaming is not None and streamed_part(checkpoint) is None:
        raise CetaneError(
            "cache.streaming: the checkpoint's heads are not in the order of the recipe", hint
        )


class Planner:
    """Resolves one recipe for one checkpoint, and keeps the blocks that builds and engines use."""

    cache_plan: type[CachePlan] = CachePlan
    """The class that decides how calls read and write caches; another runtime has its own."""

    def __init__(
        self, checkpoint: ModelSource, recipe: Recipe, like: "Planner | None" = None
    ) -> None:
        """`like` is a planner of the same checkpoint, with which this one shares blocks and checks
        as far as the recipes agree. Raises CetaneError for a recipe that does not fit."""
        check_as_asked(checkpoint, recipe)
        self.checkpoint, self.recipe = checkpoint, recipe
        self.adapters = adapters_of(checkpoint)
        self.adapter: str | None = None
        """The adapter that the calls of this planner's modes include; `on` sets it."""
        refuse_unknown(checkpoint)
        check_layers(checkpoint)
        shared = like if like is not None and same_blocks(like.recipe, recipe) else None
        self.authored: Model = self._author() if shared is None else shared.authored
        self.model = self.authored.with_lookup() if recipe.embedding.inside else self.authored
        if recipe.cache.context > self.model.max_context:
            most = self.model.max_context // 32 * 32
            raise CetaneError(
                f"cache.context = {recipe.cache.context}: {checkpoint.source} {self.model.ends}",
                f"--context {most}" if most else None,
            )
        self.memory = self.cache_plan(self.model, recipe, checkpoint.source)
        self.heads = self._make_heads()
        self.arrangement = Arrangement(
            self.model.layers, self.heads, recipe.layout, checkpoint.source
        )
        self._parts: dict[RoutedBlock, Parts] = {} if shared is None else shared._parts
        self.mode_calls = Calls(self.model, recipe, self.arrangement, self._parts)
        self.graph_maker = self._graphs_with(self.memory)
        self.smaller = {
            tokens: self._graphs_with(self.memory.at(tokens)) for tokens in recipe.cache.capacities
        }
        """The makers of the graphs of smaller capacities, ascending."""
        self.variants = Variants(
            self.arrangement, self.mode_calls, self.graph_maker, self.smaller, self.adapters
        )
        if shared is None:
            check_adapters(self.adapters, self.blocks)
        if shared is None or shared.recipe.compression != recipe.compression:
            check_weights(checkpoint, self.model, self.blocks, recipe.compression)

    def _author(self) -> Model:
        """The model's blocks, made for this recipe."""
        recipe = self.recipe

        def bits(weight: Weight) -> int:
            return format_of(weight, recipe.compression).bits

        checkpoint = self.checkpoint
        model = author(
            checkpoint.config, recipe.tensor_layout, recipe.family, checkpoint,
            bits if recipe.lowering.split_contracting else None,
        )  # fmt: skip
        for name, lora in self.adapters.items():
            adapt(model.layers, name, lora)
        streaming = recipe.cache.streaming
        return model if streaming is None else streamed(model, streaming)

    def _graphs_with(self, memory: CachePlan) -> Graphs:
        return Graphs(
            self.model, self.recipe.head.choose, self.arrangement, memory, self.mode_calls
        )

    def on(self, adapter: str | None) -> Self:
        """The same plan and blocks, with modes whose calls include an adapter."""
        view = copy(self)
        view.adapter = adapter
        return view

    def _make_heads(self) -> list[Head]:
        recipe = self.recipe
        subset = recipe.head.subset
        if subset is not None:
            check_subset(subset, self.model.vocab, self.checkpoint.source)
        heads = self.model.heads(recipe.head.slices, None if subset is None else subset.ids)
        for name, lora in self.adapters.items():
            adapt(heads, name, lora)
        return heads

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks, the head's included."""
        return (*self.model.layers, *self.heads)

    @property
    def members(self) -> Mapping[str, tuple[Block, ...]]:
        """Blocks of every shard, by shard name, in the order of their calls."""
        return self.arrangement.members

    def graphs(self, shard: str) -> list[FunctionGraph]:
        """Every function of a shard: the base's at the context, those of smaller capacities, then
        those that include an adapter."""
        return self.variants.graphs(shard)

    def widest(self, shard: str) -> list[FunctionGraph]:
        """The same functions at the largest number of tokens that a flexible shape takes."""
        if self.recipe.tokens.shapes == "static":
            return self.graphs(shard)
        most = max(self.recipe.tokens.by_mode().values())
        return self.variants.with_adapters(
            [
                self.graph_maker.graph(
                    segment,
                    segment.function(FLEXIBLE),
                    most,
                    segment.blocks,
                    self.arrangement.after(segment),
                )
                for segment in self.arrangement.segments[shard]
            ]
        )

    def module(self, graph: FunctionGraph) -> Shard:
        """The torch module of a function; its blocks are shared."""
        return Shard(
            self.model,
            graph.blocks,
            graph.caches,
            graph.histories,
            graph.function.inputs,
            graph.function.outputs,
            graph.function.adapter,
        )

    def calls(self, mode: Mode, silent: bool = False) -> Iterator[BlockCall]:
        """Every call of a mode, or every silent one, in order."""
        return self.mode_calls.calls(mode, silent)

    def truths(self, mode: Mode) -> dict[Step | Route, dict[str, Truth]]:
        """The truths of every step's outputs in a mode, by output name.

        A truth is the tensor of the Hugging Face model that an output should equal.
        """
        truths = step_truths(self.model, self.arrangement, self.mode_calls, mode)
        return {
            self.variants.step(step, capacity, self.adapter): outputs
            for capacity in (None, *self.smaller)
            for step, outputs in truths.items()
        }

    def feeds(self, shard: str) -> dict[str, Truth]:
        """The truths of the tensors that a shard takes from earlier shards, by tensor name."""
        return shard_feeds(self.arrangement, shard)

    def makers(self, shard: str) -> list[str]:
        """The earlier shards that make this shard's inputs without a truth."""
        return makers(self.arrangement, shard)

    def plan(self) -> Plan:
        """The whole plan. If this planner is `on` an adapter, the plan's modes include it."""
        recipe, model = self.recipe, self.model
        shards = tuple(self._shard(name, blocks) for name, blocks in self.members.items())
        contexts = {c for c in STATED_CONTEXTS if c <= model.max_context} | {recipe.cache.context}
        order, context = self.arrangement.order, recipe.cache.context
        tables = host_tables(self.model, self.recipe)
        plan = Plan(
            architecture=str(self.checkpoint.config["model_type"]),
            recipe=recipe,
            hidden=model.hidden,
            vocab=model.vocab,
            layers=len({block.layer for block in model.layers}),
            embedding_bytes=sum(map(ROW_FORMATS[recipe.embedding.rows].nbytes, tables.values())),
            weight_bytes=sum(shard.weight_bytes for shard in shards),
            mean_bits=mean_bits(self.blocks, recipe.compression),
            kv_bytes={length: self.memory.nbytes(order, length) for length in sorted(contexts)},
            kv_padding=self.memory.nbytes(order, context) - self.memory.own_nbytes(context),
            caches=dict(self.memory.slots),
            softcap=None if recipe.head.choose == "argmax" else model.softcap,
            tables=tables,
            rotary=tuple(model.rotary),
            shards=shards,
            modes=self._modes(None),
            adapters={name: self._adapter(name, lora) for name, lora in self.adapters.items()},
            smaller=tuple(map(self._capacity, self.smaller)),
        )
        return plan.on(self.adapter)

    def _adapter(self, name: str, lora: Lora) -> AdapterPlan:
        return AdapterPlan(
            rank=lora.rank,
            dora=lora.config.use_dora,
            stated_base=lora.config.base_model_name_or_path,
            weight_bytes=adapter_bytes(self.blocks, name),
            modes=self._modes(name),
        )

    def _capacity(self, tokens: int) -> CapacityPlan:
        return CapacityPlan(
            tokens=tokens,
            caches=dict(self.memory.at(tokens).slots),
            modes=self._modes(None, tokens),
            adapters={name: self._modes(name, tokens) for name in self.adapters},
        )

    def _modes(self, adapter: str | None, capacity: int | None = None) -> dict[Mode, ModePlan]:
        """The calls of every mode, with an adapter or without, at a capacity; None for the
        context."""
        order, calls = self.arrangement.order, self.mode_calls

        def own(steps: Callable[[Segment, Mode], Iterator[Step | Route]], mode: Mode) -> Steps:
            return tuple(
                self.variants.step(step, capacity, adapter)
                for segment in order
                for step in steps(segment, mode)
            )

        return {
            mode: ModePlan(
                tokens=tokens, steps=own(calls.steps, mode), silent=own(calls.silent_steps, mode)
            )
            for mode, tokens in self.recipe.tokens.by_mode().items()
        }

    def _shard(self, name: str, blocks: tuple[Block, ...]) -> ShardPlan:
        kinds = {isinstance(block, Head) for block in blocks}
        return ShardPlan(
            name=name,
            kind="model" if len(kinds) == 2 else "head" if kinds == {True} else "layers",
            blocks=tuple(block.name for block in blocks),
            weight_bytes=weight_bytes(blocks, self.recipe.compression),
            functions=tuple(graph.function for graph in self.graphs(name)),
        )


def host_tables(model: Model, recipe: Recipe) -> dict[str, TablePlan]:
    """The tables that the host keeps, with a row for each token."""
    tables = {
        name: TablePlan(rows=table.rows, channels=table.channels)
        for name, table in model.tables.items()
    }
    if not recipe.embedding.inside:
        tables["tokens"] = TablePlan(rows=model.vocab, channels=model.hidden)
    return tables


def check_subset(subset: Subset, vocabulary: int, source: str) -> None:
    """Raise CetaneError if a head's tokens were chosen for another vocabulary."""
    if subset.vocabulary != vocabulary:
        raise CetaneError(
            f"head.subset is for {subset.vocabulary} tokens, but {source} has {vocabulary}",
            "cetane vocabulary makes one for a model",
        )


def check_adapters(adapters: Mapping[str, Lora], blocks: Sequence[Block]) -> None:
    """Raise CetaneError for a change that no projection of the model can take."""
    for name, lora in adapters.items():
        taken = {
            piece.weight
            for block in blocks
            for _, weight in block.adapter_weights(name)
            if (piece := AdapterTensor.parse(weight.name)) is not None
        }
        left = sorted((lora.changes.keys() | lora.replaced.keys()) - taken)
        if left:
            raise CetaneError(
                f"adapter {name}: {lora.folder} changes {left[0]}, which is no projection here",
                SHARED_BASE,
            )


def same_blocks(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes for a checkpoint have the same blocks.

    With `lowering.split_contracting`, the bits of weights decide which projections are split.
    """
    split = one.lowering.split_contracting or other.lowering.split_contracting
    keys = ["tensor_layout", "family", *(["lowering", "compression"] if split else [])]
    alike = one.cache.streaming == other.cache.streaming
    return alike and all(getattr(one, key) == getattr(other, key) for key in keys)
