"""The planner of ANEMLL's packages: functions, with inputs and outputs as in the contract."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from cetane.checkpoint import Checkpoint
from cetane.compress.formats import Palette
from cetane.export.anemll.adapter import Chunk, Embeddings, LmHead, Ring
from cetane.export.anemll.contract import (
    BATCH,
    PREFIXES,
    ROTATE,
    STATE,
    FolderSizes,
    Names,
    Shape,
    parts_for,
)
from cetane.export.anemll.refusals import check_batch, refuse
from cetane.families import Block, CacheForm, CacheGroup, CacheSpec, Head, Model, Part, Stateful
from cetane.planner import CachePlan, FunctionGraph, GraphMaker, Planner, Segment
from cetane.planner.weights import format_of
from cetane.schema.function import Function
from cetane.schema.interface import FromTensor, Input, Output, Position, State, TokenIds, ToTensor
from cetane.schema.recipe import (
    CacheSection,
    EmbeddingSection,
    HeadSection,
    LayoutSection,
    Recipe,
    TokensSection,
)
from cetane.schema.slots import Slots

EMBEDDINGS, LM_HEAD = "embeddings", "lm_head"


class OneState(CachePlan):
    """Caches in one state that all packages declare: a row of it for each layer's keys, and one
    for its values, as long as the context. A window uses the first slots of its rows."""

    def __init__(self, model: Model, recipe: Recipe, source: str, rotating: bool) -> None:
        """`rotating`: for positions beyond the window."""
        self.rotating = rotating
        super().__init__(model, recipe, source)
        self.before: dict[str, dict[str, int]] = {}
        """The layers of each group in earlier shards, by shard."""

    def _slots(self, group: CacheGroup, context: int) -> Slots:
        count = min(context, group.window or context)
        return Slots(contract="stateful", count=count, limited=count < context)

    def form(self, group: str, tokens: int) -> type[CacheForm]:
        return Ring if self.rotating and self.slots[group].limited else Stateful

    def visible(self, group: str, tokens: int) -> int:
        joined = self.form(group, tokens) is Ring and tokens > 1
        return self.slots[group].count + (tokens if joined else 0)

    @cached_property
    def state(self) -> State:
        layers = sum(self._kept_groups(self.model.layers).values())
        groups = self.groups.values()
        shape = (
            2 * layers,
            max(group.heads for group in groups),
            max(group.dim for group in groups),
            self.recipe.cache.context,
        )
        return State(name=STATE, shape=shape)

    def caches(self, segment: Segment, tokens: int) -> tuple[CacheSpec, ...]:
        """The groups of a segment. The rows of a group follow those of the group before."""
        earlier, first = self.before[segment.shard], {}
        row = 0
        for name, layers in self._kept_groups(self.model.layers).items():
            first[name] = row + 2 * earlier.get(name, 0)
            row += 2 * layers
        return tuple(
            replace(spec, state=self.state, first=first[spec.group])
            for spec in super().caches(segment, tokens)
        )


class AnemllPlanner:
    """Plans the embeddings, the chunks and the head, as the programs that `Lowering` takes."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe) -> None:
        """Raises CetaneError for a model or a recipe that their hosts cannot run."""
        self.planner = Planner(checkpoint, adapted(recipe))
        self.recipe, self.model = self.planner.recipe, self.planner.model
        refuse(self.planner, recipe)
        self.architecture = str(checkpoint.config["model_type"])
        self.plain, self.rotating = (
            OneState(self.model, self.recipe, checkpoint.source, rotating)
            for rotating in (False, True)
        )
        # A recipe's formats are for projections. No gate judged them for rows that a host keeps.
        (self.lookup, *_) = self.model.with_lookup(kind=None).layers
        self.sizes = self._sizes(recipe)
        self.heads = self._heads()
        self.norm = Part(
            "norm", self.heads[0], ("norm",), ("hidden",), ("hidden",), final_norm(self.heads[0])
        )
        self._count_layers()
        check_batch(self.sizes)

    def _sizes(self, recipe: Recipe) -> FolderSizes:
        limited = [slots.count for slots in self.plain.slots.values() if slots.limited]
        head = Head(0, self.model, 0, self.model.vocab, range(self.model.vocab))
        (weight,) = (w for _, w in head.weights() if w.kind is not None)
        form = format_of(weight, recipe.compression)
        group = form.group if isinstance(form, Palette) and form.group else 1
        return FolderSizes(
            hidden=self.model.hidden,
            vocab=self.model.vocab,
            context=recipe.cache.context,
            batch=recipe.tokens.prefill or BATCH,
            parts=parts_for(self.architecture, self.model.vocab, group),
            window=min(limited, default=None),
            choose=bool(recipe.head.choose),
        )

    def _heads(self) -> tuple[Head, ...]:
        """The parts of the head."""
        vocab, rows = self.model.vocab, self.sizes.rows
        cuts = [(start, min(start + rows, vocab)) for start in range(0, vocab, rows)]
        with torch.device("meta"):
            return tuple(
                Head(number, self.model, start, stop, range(start, stop))
                for number, (start, stop) in enumerate(cuts)
            )

    def _count_layers(self) -> None:
        for memory in (self.plain, self.rotating):
            seen: dict[str, int] = {}
            for shard, blocks in self.chunks.items():
                memory.before[shard] = dict(seen)
                for block in blocks:
                    for name in block.keeps:
                        seen[name] = seen.get(name, 0) + 1

    @cached_property
    def chunks(self) -> dict[str, tuple[Block, ...]]:
        """The layers of every chunk."""
        heads = set(self.planner.heads)
        return {
            shard: blocks
            for shard, blocks in self.planner.members.items()
            if not heads.issuperset(blocks)
        }

    @cached_property
    def members(self) -> Mapping[str, tuple[Block, ...]]:
        """Blocks of every shard. The last chunk ends with the final norm."""
        *_, last = self.chunks
        chunks = self.chunks | {last: (*self.chunks[last], self.heads[0])}
        return {EMBEDDINGS: (self.lookup,), **chunks, LM_HEAD: self.heads}

    @property
    def names(self) -> dict[str, str]:
        """Their names of the shards."""
        names = Names(PREFIXES.get(self.architecture, self.architecture), len(self.chunks))
        return dict(zip(self.members, names.all, strict=True))

    def graphs(self, shard: str) -> list[FunctionGraph]:
        if shard == EMBEDDINGS:
            return [self._embeddings(1)]
        if shard == LM_HEAD:
            return [self._lm_head()]
        return [self._chunk(shard, name, tokens)[0] for name, tokens in self.sizes.functions()]

    def widest(self, shard: str) -> list[FunctionGraph]:
        """The embeddings take one token, or a batch."""
        return [self._embeddings(self.sizes.batch)] if shard == EMBEDDINGS else self.graphs(shard)

    def _embeddings(self, tokens: int) -> FunctionGraph:
        ids = Input(name="input_ids", shape=(1, tokens), dtype="int32", source=TokenIds())
        outputs = (output("hidden_states", (1, tokens, self.model.hidden)),)
        function = Function(
            name="main", owner=EMBEDDINGS, tokens=tokens, inputs=(ids,), outputs=outputs
        )
        return FunctionGraph(function, (self.lookup,), (), ())

    def _lm_head(self) -> FunctionGraph:
        parts = tuple(
            Part(
                head.name, head, ("lm_head",), ("hidden",), ("logits",), head_part(head)
            )
            for head in self.heads
        )  # fmt: skip
        function = Function(
            name="main",
            owner=LM_HEAD,
            tokens=1,
            inputs=(given("hidden_states", "fp16", (1, 1, self.model.hidden)),),
            outputs=tuple(
                output(tensor, shape, dtype)
                for tensor, (dtype, shape) in self.sizes.head_outputs().items()
            ),
        )
        return FunctionGraph(function, parts, (), ())

    def _chunk(self, shard: str, name: str, tokens: int) -> tuple[FunctionGraph, Function]:
        """The graph of a chunk's function, and the function as cetane's engine would call it."""
        first, last = next(iter(self.chunks)), list(self.chunks)[-1]
        memory = self.rotating if name.endswith(ROTATE) else self.plain
        norm = (self.norm,) if shard == last and tokens == 1 else ()
        blocks = (*self.chunks[shard], *norm)
        handed = () if shard == first else ("hidden",)
        maker, segment = GraphMaker(self.model, memory), Segment(shard, "", self.chunks[shard])
        inner = maker.make(segment, name, tokens, blocks, handed, ("hidden",))
        function = inner.function.model_copy(
            update={
                "inputs": tuple(
                    given(tensor, dtype, shape)
                    for tensor, (dtype, shape) in self.sizes.inputs(tokens).items()
                ),
                "outputs": tuple(
                    output(tensor, shape, dtype)
                    for tensor, (dtype, shape) in self.sizes.outputs(tokens, shard == last).items()
                ),
                "states": (self.plain.state,),
            }
        )
        return replace(inner, function=function), inner.function

    def module(self, graph: FunctionGraph) -> Any:
        function = graph.function
        if function.owner == EMBEDDINGS:
            return Embeddings(self.lookup)
        if function.owner == LM_HEAD:
            return LmHead(self.heads, self.sizes, self.model.softcap)
        inner = self._chunk(function.owner, function.name, function.tokens)[1]
        last = function.owner == list(self.chunks)[-1]
        return Chunk(self.model, graph.blocks, graph.caches, inner, self.sizes, last)


def adapted(recipe: Recipe) -> Recipe:
    """A recipe in their form: chunks, one state, a head and an embedding apart."""
    layout = recipe.layout
    chunks = layout if layout.kind == "chunks" else LayoutSection(kind="chunks", chunks=None)
    if layout.kind == "single":
        chunks = LayoutSection(kind="chunks", chunks=1)
    types = {kind: form for kind, form in recipe.compression.types.items() if kind != "embedding"}
    return recipe.model_copy(
        update={
            "tensor_layout": "c1t",
            "layout": chunks.model_copy(update={"head": "apart", "routed": ()}),
            "cache": CacheSection(contract="stateful", context=recipe.cache.context),
            "tokens": TokensSection(verify=None, prefill=recipe.tokens.prefill or BATCH),
            "embedding": EmbeddingSection(),
            "compression": recipe.compression.model_copy(update={"types": types}),
            "head": HeadSection(),
        }
    )


def final_norm(head: Head) -> Any:
    """A function that norms the hidden state."""

    def run(flow: dict[str, Any]) -> None:
        flow["hidden"] = head.norm(flow["hidden"])

    return run


def head_part(head: Head) -> Any:
    """A function that gives the logits of a normed hidden state."""

    def run(flow: dict[str, Any]) -> None:
        flow["logits"] = head.lm_head(flow["hidden"])

    return run


def given(name: str, dtype: Any, shape: Shape) -> Input:
    """An input. Slices read `current_pos`, so it is a position."""
    source = Position(group="all") if name == "current_pos" else FromTensor(name=name)
    return Input(name=name, shape=shape, dtype=dtype, source=source)


def output(name: str, shape: Shape, dtype: Any = "fp16") -> Output:
    return Output(name=name, shape=shape, dtype=dtype, sink=ToTensor(name=name))
