"""A recipe resolved against a model: shards, functions, inputs, outputs, states and bytes.

Reads shapes from modules on torch's meta device, and no weights but those on which a family's own
option depends.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby, pairwise
from math import prod
from typing import Any, Protocol

from cetane.errors import CetaneError
from cetane.families import author
from cetane.families.base import (
    Block,
    CacheGroup,
    Head,
    History,
    Model,
    Part,
    RoutedBlock,
    Truth,
    Weight,
    Weights,
)
from cetane.families.caches import Cache, CacheSpec, HistorySpec, cache_form
from cetane.families.shard import Shard
from cetane.schema.function import Function, ModePlan, Route, ShardPlan, Step, TablePlan
from cetane.schema.interface import (
    Embedding,
    FromTensor,
    Input,
    Mask,
    Output,
    Rotary,
    Shape,
    State,
    ToChoice,
    TokenIds,
    ToLogits,
    ToTensor,
    hidden_shape,
)
from cetane.schema.plan import Plan
from cetane.schema.recipe import Layout, Mode, Recipe
from cetane.schema.slots import PADDED, Slots

CONTEXTS = (512, 1024, 2048, 4096, 8192)
"""Context lengths for which a plan states the cache's size, beside the recipe's own."""


class Source(Weights, Protocol):
    """What a plan needs of a checkpoint: its config, and which tensors it has."""

    @property
    def source(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Segment:
    """Consecutive blocks of a shard that run in one call; a shard has several where tokens are
    routed between them."""

    shard: str
    suffix: str
    """What tells its functions from those of the shard's other segments."""
    blocks: tuple[Block, ...]

    @property
    def owner(self) -> str:
        """Whose caches and histories these are."""
        return self.shard + self.suffix


@dataclass(frozen=True)
class Graph:
    """One function, and what it is traced from."""

    function: Function
    blocks: tuple[Block, ...]
    caches: tuple[CacheSpec, ...]
    histories: tuple[HistorySpec, ...]


class Programs(Protocol):
    """Shards as functions that can be traced: what lowering needs of a planner."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def members(self) -> Mapping[str, tuple[Block, ...]]:
        """Blocks of every shard."""

    def graphs(self, shard: str) -> list[Graph]:
        """Every function of a shard."""

    def widest(self, shard: str) -> list[Graph]:
        """The same functions at the most tokens that a flexible shape may have."""

    def module(self, graph: Graph) -> Shard:
        """The torch module of a function."""


class Planner:
    """Resolves one recipe for one checkpoint; keeps the blocks for whoever builds or runs them."""

    def __init__(self, checkpoint: Source, recipe: Recipe, like: "Planner | None" = None) -> None:
        """`like` plans the same checkpoint: where the recipes agree, its blocks serve both, and
        what was checked is not checked again."""
        self.checkpoint, self.recipe = checkpoint, recipe
        layers, tensors = checkpoint.config.get("num_hidden_layers"), len(checkpoint.names())
        if isinstance(layers, int) and layers > tensors:  # before a module is made for each
            raise CetaneError(
                f"{checkpoint.source}: the config says {layers} layers, "
                f"but there are only {tensors} tensors"
            )
        shared = like is not None and all(
            getattr(like.recipe, key) == getattr(recipe, key) for key in ("tensor_layout", "family")
        )
        self.model: Model = (
            like.model
            if like is not None and shared
            else author(checkpoint.config, recipe.tensor_layout, recipe.family, checkpoint)
        )
        if recipe.embedding.inside:
            self.model = self.model.with_lookup()
        if recipe.cache.context > self.model.max_context:
            raise CetaneError(
                f"cache.context = {recipe.cache.context}: {checkpoint.source} was trained for "
                f"{self.model.max_context} positions"
            )
        self._parts: dict[str, tuple[Part, tuple[Part, ...]]] = (
            like._parts if like is not None and shared else {}
        )
        self.slots = {
            name: self._slots(group, recipe.cache.context)
            for name, group in self.model.memory.items()
            if isinstance(group, CacheGroup)
        }
        self._check_slots()
        subset = recipe.head.subset
        if subset is not None and subset.vocabulary != self.model.vocab:
            raise CetaneError(
                f"head.subset: of {subset.vocabulary} tokens, but {checkpoint.source} has "
                f"{self.model.vocab}",
                "cetane vocabulary makes one for a model",
            )
        self.heads = self.model.heads(recipe.head.slices, None if subset is None else subset.ids)
        if recipe.lowering.split_contracting:
            for block in (*self.model.layers, *self.heads):
                block.split_contracting(self._bits)
        self.members = self._members()
        self.segments = {
            shard: self._segments(shard, blocks) for shard, blocks in self.members.items()
        }
        self._order = [segment for segments in self.segments.values() for segment in segments]
        if like is None or not shared or like.recipe.compression != recipe.compression:
            self._check_tensors()

    def _slots(self, group: CacheGroup, context: int) -> Slots:
        """How long the caches of a group are: a multiple of 32, as ANE rows are aligned."""
        cache = self.recipe.cache
        if group.window is None:
            return Slots(contract=cache.contract, count=context)
        contract = cache.sliding or cache.contract
        if not cache.windowed:
            return Slots(contract=contract, count=context)
        need = group.sinks + group.window
        if contract == "stateful":  # it is written before the first token of a call has looked
            need += max(self.recipe.tokens.by_mode().values()) - 1
        count = min(context, -(-need // 32) * 32)
        limited = count < context
        return Slots(
            contract=contract,
            count=count,
            limited=limited,
            sinks=group.sinks if limited else 0,
        )

    def _check_slots(self) -> None:
        """CetaneError for what the contracts of limited caches cannot do."""
        windows = [g.window for g in self.model.memory.values() if isinstance(g, CacheGroup)]
        if self.recipe.cache.sliding is not None and not any(windows):
            raise CetaneError(
                f"cache.sliding: no layers of {self.checkpoint.source} see only a window"
            )
        for name, slots in self.slots.items():
            if slots.limited and slots.contract in ("shift", "blend"):
                if self.recipe.tokens.shapes == "range":
                    raise CetaneError(
                        f"tokens.shapes = 'range': a {slots.contract} cache of a window has other "
                        "inputs for one token than for several",
                        "use static shapes, or a readonly cache",
                    )
                if slots.contract == "shift" and slots.sinks:
                    raise CetaneError(
                        f"a shift cache forgets the first tokens, which layers of {name} see",
                        "use another contract for them: cache.sliding",
                    )

    def _members(self) -> dict[str, tuple[Block, ...]]:
        """Blocks of every shard, by shard name, in the order of their calls."""
        blocks, heads = self.model.layers, self.heads
        layout = self.recipe.layout
        layers = [tuple(group) for _, group in groupby(blocks, key=lambda block: block.layer)]
        if layout.kind == "single":
            return {"model": (*blocks, *heads)}
        if layout.kind == "per-block":
            shards: dict[str, tuple[Block, ...]] = {block.name: (block,) for block in blocks}
        elif layout.kind == "per-layer":
            shards = {f"layer-{index:02}": layer for index, layer in enumerate(layers)}
        else:
            bounds = chunk_bounds(layout, len(layers))
            shards = {
                f"chunk-{i:02}": tuple(chain.from_iterable(layers[start:stop]))
                for i, (start, stop) in enumerate(pairwise(bounds))
            }
        if layout.head == "last":
            *_, last = shards
            return shards | {last: (*shards[last], *heads)}
        return shards | {head.name: (head,) for head in heads}

    def _segments(self, shard: str, blocks: tuple[Block, ...]) -> tuple[Segment, ...]:
        """A shard cut after every block whose experts are functions of their own."""
        if not self.recipe.layout.routed:
            return (Segment(shard, "", blocks),)
        if not any(isinstance(block, RoutedBlock) for block in self.model.layers):
            raise CetaneError(f"layout.routed: {self.checkpoint.source} has no experts")
        cuts = [0, *(i + 1 for i, b in enumerate(blocks) if isinstance(b, RoutedBlock))]
        pieces = [blocks[a:b] for a, b in pairwise([*cuts, len(blocks)]) if a < b]
        for block in blocks:
            if isinstance(block, RoutedBlock) and not block.one_expert:
                raise CetaneError("layout.routed: the family's options mix all experts")
        single = len(pieces) == 1
        return tuple(
            Segment(shard, "" if single else f"-{index:02}", piece)
            for index, piece in enumerate(pieces)
        )

    def _check_tensors(self) -> None:
        """Every weight is in the checkpoint, fits its format, and every rule matches something."""
        kinds: dict[str, str] = {}
        table = self.model.embedding
        self._check_shape(table.weight, (self.model.vocab, self.model.hidden))
        for name in filter(None, (table.bias, table.scale)):
            self._check_shape(name, (self.model.hidden,))
        for other in self.model.tables.values():
            self._check_shape(other.table.weight, (other.rows, other.channels))
        for block in (*self.model.layers, *self.heads):
            for _, weight in block.weights():
                self._check_shape(weight.name, weight.stored)
                if weight.kind:
                    kinds[weight.name] = weight.kind
                    selected = self.recipe.compression.format_for(weight.name, weight.kind)
                    selected.check(weight.shape, weight.name)
        self.recipe.compression.check(kinds)

    def _bits(self, weight: Weight) -> int:
        """Of one element, as the recipe stores it."""
        if weight.kind is None:
            return 16
        return self.recipe.compression.format_for(weight.name, weight.kind).bits

    def _check_shape(self, name: str, wanted: Shape) -> None:
        if name not in self.checkpoint:
            raise CetaneError(f"{self.checkpoint.source}: no tensor {name}")
        stored = tuple(self.checkpoint.shape(name))
        if stored != wanted:
            raise CetaneError(
                f"{self.checkpoint.source}: {name} has shape {stored}, the config says {wanted}"
            )

    def _kept(self, blocks: Sequence[Block]) -> Counter[str]:
        """How many of the blocks keep a memory of each name."""
        return Counter(name for block in blocks for name in block.keeps)

    def form(self, group: str, tokens: int) -> type[Cache]:
        """How a call of so many tokens reads and writes the caches of a group."""
        return cache_form(self.slots[group], tokens)

    def caches(self, segment: Segment, tokens: int) -> tuple[CacheSpec, ...]:
        """The cache groups of a segment, for a call of so many tokens."""
        memory = self.model.memory
        state = self._padded(segment.blocks, self.slots)
        rows = dict(self._rows(segment.blocks))
        return tuple(
            CacheSpec(
                owner=segment.owner,
                group=name,
                layers=layers,
                heads=group.heads,
                dim=group.dim,
                slots=self.slots[name].count,
                form=self.form(name, tokens),
                state=state,
                first=rows[name] if state else 0,
            )
            for name, layers in self._kept(segment.blocks).items()
            if isinstance(group := memory[name], CacheGroup)
        )

    def _rows(self, blocks: Sequence[Block]) -> Iterator[tuple[str, int]]:
        """By group, the first row of some blocks' layers in a state that they share."""
        row = 0
        for name, layers in self._kept(blocks).items():
            if isinstance(self.model.memory[name], CacheGroup):
                yield name, row
                row += 2 * layers

    def _padded(self, blocks: Sequence[Block], slots: dict[str, Slots]) -> State | None:
        """The one state of some blocks, if they share one: rows as large as the largest."""
        kept = {
            name: (layers, group)
            for name, layers in self._kept(blocks).items()
            if isinstance(group := self.model.memory[name], CacheGroup)
        }
        if not self.recipe.cache.padded or not kept:
            return None
        shape = (
            sum(2 * layers for layers, _ in kept.values()),
            max(self.recipe.cache.state_heads, *(group.heads for _, group in kept.values())),
            max(group.dim for _, group in kept.values()),
            max(slots[name].count for name in kept),
        )
        return State(name=PADDED, shape=shape)

    def histories(self, segment: Segment) -> tuple[HistorySpec, ...]:
        """The histories of a segment."""
        order, memory = self.model.order, self.model.memory
        return tuple(
            HistorySpec(segment.owner, name, layers, kept.channels, kept.length, order)
            for name, layers in self._kept(segment.blocks).items()
            if isinstance(kept := memory[name], History)
        )

    def graphs(self, shard: str) -> list[Graph]:
        """Every function of a shard."""
        return [
            graph
            for segment in self.segments[shard]
            for name, tokens in self.widths.items()
            for graph in self._segment_graphs(segment, name, tokens)
        ]

    @cached_property
    def _kept_up(self) -> frozenset[Block]:
        """The blocks on which something depends that is kept; all layers, unless some share."""
        wanted: set[str] = set()
        live = set()
        for block in reversed([block for segment in self._order for block in segment.blocks]):
            if not self.model.shared:
                live |= {block} - set(self.heads)
            elif block.keeps or wanted & set(block.writes):
                live.add(block)
                wanted = wanted - set(block.writes) | set(block.reads)
        return frozenset(live)

    def _silent(self, segment: Segment) -> tuple[Block, ...]:
        """The blocks of a segment that must run where nobody reads the logits."""
        return tuple(block for block in segment.blocks if block in self._kept_up)

    def _fills(self, segment: Segment, mode: str) -> bool:
        """Whether a segment has a function of its own for that: where layers that share others'
        caches are behind them, in prefill."""
        silent = self._silent(segment)
        layers = [block for block in segment.blocks if not isinstance(block, Head)]
        return mode == "prefill" and bool(self.model.shared) and 0 < len(silent) < len(layers)

    def widest(self, shard: str) -> list[Graph]:
        """The same functions at the most tokens that a flexible shape may have."""
        most = max(self.recipe.tokens.by_mode().values())
        return [
            self._graph(s, f"main{s.suffix}", most, s.blocks, self._after(s))
            for s in self.segments[shard]
        ]

    def _segment_graphs(self, segment: Segment, name: str, tokens: int) -> Iterator[Graph]:
        """The function of a segment, or where its experts are routed to, those of the parts."""
        *before, last = segment.blocks
        full = f"{name}{segment.suffix}"
        if not self._routes(segment, name):
            yield self._graph(segment, full, tokens, segment.blocks, self._after(segment))
            if self._fills(segment, name):
                later = [block for block in self._after(segment) if block in self._kept_up]
                silent = self._silent(segment)
                # A program must have an output, and use all weights that it is said to have.
                yield self._graph(
                    segment, f"fill{segment.suffix}", tokens, silent, later, {"hidden"}
                )
            return
        assert isinstance(last, RoutedBlock)
        experts = last.experts()
        after = [*experts, *self._after(segment)]
        yield self._graph(segment, full, tokens, (*before, last.router()), after, {last.scores})
        for index, expert in enumerate(experts):
            called = f"expert-{index:02}-{full}"
            made = segment.blocks
            yield self._graph(segment, called, tokens, (expert,), self._after(segment), made=made)

    def _routes(self, segment: Segment, mode: str) -> bool:
        return mode in self.recipe.layout.routed and isinstance(segment.blocks[-1], RoutedBlock)

    def _after(self, segment: Segment) -> list[Block]:
        index = self._order.index(segment)
        return [block for later in self._order[index + 1 :] for block in later.blocks]

    def _graph(
        self,
        segment: Segment,
        name: str,
        tokens: int,
        blocks: tuple[Block, ...],
        after: Sequence[Block],
        wanted: set[str] = frozenset(),  # type: ignore[assignment]
        made: Sequence[Block] = (),
    ) -> Graph:
        """One function: what its blocks read and do not make comes in, what is read after them, or
        `wanted`, goes out. `made` are blocks of the segment that ran before."""
        index = self._order.index(segment)
        earlier = [b for s in self._order[:index] for b in s.blocks]
        handed = {written for block in (*earlier, *made) for written in block.writes}
        if made:
            handed |= {w for b in made if isinstance(b, RoutedBlock) for w in b.router().writes}
        inputs: dict[str, Input] = {}
        inside: set[str] = set()
        for block in blocks:
            for read in block.reads:
                if read not in inside and read not in inputs:
                    inputs[read] = self._input(read, tokens, handed)
            inside |= set(block.writes)
        live = needed(after) | wanted
        outputs = [
            Output(
                name=f"{name}_out",
                shape=self._shape(name, tokens),
                sink=ToTensor(name=name),
            )
            for name in (*self.model.channels, *self.model.shared)
            if name in inside & live
        ]
        keeping = any(block.keeps for block in blocks)
        caches = self.caches(segment, tokens) if keeping else ()
        histories = self.histories(segment) if keeping else ()
        for cache in caches:
            for item in cache.form.inputs(cache, tokens):
                inputs[item.name] = item
            outputs += cache.form.outputs(cache, tokens)
        for history in histories:
            inputs[history.name] = history.input()
            outputs.append(history.output(tokens))
        heads = [block for block in blocks if isinstance(block, Head)]
        for number, head in enumerate(heads):
            outputs += self._head_outputs(head, number, tokens)
        function = Function(
            name=name,
            owner=segment.owner,
            tokens=tokens,
            inputs=tuple(inputs.values()),
            outputs=tuple(outputs),
            states=tuple(dict.fromkeys(s for cache in caches for s in cache.form.states(cache))),
        )
        return Graph(function, blocks, caches, histories)

    def _head_outputs(self, head: Head, number: int, tokens: int) -> list[Output]:
        """Logits, or the largest of them and its row."""
        start, stop = head.start, head.stop
        if not self.recipe.head.choose:
            shape = hidden_shape(self.model.order, stop - start, tokens)
            sink = ToLogits(start=start, stop=stop)
            return [Output(name=f"logits_{number}", shape=shape, sink=sink)]
        row = ToChoice(part="row", start=start, stop=stop)
        logit = ToChoice(part="logit", start=start, stop=stop)
        return [
            Output(name=f"row_{number}", shape=(1, tokens), dtype="int32", sink=row),
            Output(name=f"logit_{number}", shape=(1, tokens), sink=logit),
        ]

    def visible(self, group: str, tokens: int) -> int:
        """How many keys of a cache group a call of `tokens` tokens sees."""
        return self.slots[group].visible(tokens)

    def _shape(self, name: str, tokens: int) -> Shape:
        if name in self.model.shared:
            group = self.model.shared[name]
            kept = self.model.memory[group]
            assert isinstance(kept, CacheGroup)
            return (1, kept.heads, kept.dim, self.visible(group, tokens))
        return hidden_shape(self.model.order, self.model.channels[name], tokens)

    def _input(self, name: str, tokens: int, handed: set[str]) -> Input:
        """A tensor that a block reads: from an earlier call when one made it, else the host."""
        if name in handed:
            return Input(name=name, shape=self._shape(name, tokens), source=FromTensor(name=name))
        source = self.model.host[name]
        shape: Shape
        if isinstance(source, TokenIds):
            return Input(name=name, shape=(1, tokens), dtype="int32", source=source)
        if isinstance(source, Embedding):
            shape = self._shape(name, tokens)
        elif isinstance(source, Rotary):
            dim = 2 * self.model.rotary[source.table].inverse_frequencies.numel()
            shape = (1, 1, dim, tokens)
        else:
            assert isinstance(source, Mask)
            shape = (1, 1, tokens, self.visible(source.group, tokens))
        return Input(name=name, shape=shape, source=source)

    def module(self, graph: Graph) -> Shard:
        """The torch module of a function; its blocks are shared."""
        return Shard(
            self.model,
            graph.blocks,
            graph.caches,
            graph.histories,
            graph.function.inputs,
            graph.function.outputs,
        )

    def plan(self) -> Plan:
        """The whole plan."""
        modes = self.recipe.tokens.by_mode()
        shards = tuple(self._shard(name, blocks) for name, blocks in self.members.items())
        sizes, bits = [], []
        for block in (*self.model.layers, *self.heads):
            for _, weight in block.weights():
                if weight.kind:
                    chosen = self.recipe.compression.format_for(weight.name, weight.kind)
                    sizes.append(weight.elements)
                    bits.append(weight.elements * chosen.bits)
        contexts = {c for c in CONTEXTS if c <= self.model.max_context}
        tables = {
            name: TablePlan(rows=table.rows, channels=table.channels)
            for name, table in self.model.tables.items()
        }
        if not self.recipe.embedding.inside:
            tables["tokens"] = TablePlan(rows=self.model.vocab, channels=self.model.hidden)
        return Plan(
            architecture=str(self.checkpoint.config["model_type"]),
            recipe=self.recipe,
            hidden=self.model.hidden,
            vocab=self.model.vocab,
            layers=len({block.layer for block in self.model.layers}),
            embedding_bytes=sum(
                t.rows
                * (2 * t.channels if self.recipe.embedding.format == "fp16" else t.channels + 2)
                for t in tables.values()
            ),
            weight_bytes=sum(shard.weight_bytes for shard in shards),
            mean_bits=sum(bits) / sum(sizes),
            kv_bytes={
                context: self._cache_bytes(context)
                for context in sorted(contexts | {self.recipe.cache.context})
            },
            kv_padding=self._cache_bytes(self.recipe.cache.context)
            - self._own_bytes(self.recipe.cache.context),
            caches=self.slots,
            softcap=self.model.softcap,
            tables=tables,
            rotary=tuple(self.model.rotary),
            shards=shards,
            modes={
                mode: ModePlan(
                    tokens=tokens,
                    steps=tuple(
                        step for segment in self._order for step in self._steps(segment, mode)
                    ),
                    silent=tuple(
                        step
                        for segment in self._order
                        for step in self._silent_steps(segment, mode)
                    ),
                )
                for mode, tokens in modes.items()
            },
        )

    def _cache_bytes(self, context: int) -> int:
        """Keys and values of the whole model, padding of states included."""
        slots = {
            name: self._slots(group, context)
            for name, group in self.model.memory.items()
            if isinstance(group, CacheGroup)
        }
        states = [self._padded(segment.blocks, slots) for segment in self._order]
        padded = sum(2 * prod(state.shape) for state in states if state is not None)
        return padded or self._own_bytes(context)

    def _own_bytes(self, context: int) -> int:
        """Keys and values of the whole model themselves."""
        kept = [self.model.memory[name] for block in self.model.layers for name in block.keeps]
        return sum(
            2 * 2 * group.heads * group.dim * self._slots(group, context).count
            for group in kept
            if isinstance(group, CacheGroup)
        )

    def truths(self, mode: Mode) -> dict[Step | Route, dict[str, Truth]]:
        """For every step of a mode, what its outputs should equal in the Hugging Face model, by
        output name."""
        return {
            step: {
                f"{name}_out": truth
                for block in blocks
                for name, truth in block.truths().items()
                if name in self.model.channels
            }
            for segment in self._order
            for step, blocks in zip(
                self._steps(segment, mode), self._step_blocks(segment, mode), strict=True
            )
        }

    def calls(self, mode: Mode) -> Iterator[tuple[Segment, tuple[Block, ...], bool]]:
        """What every call of a mode computes, in order; True for experts, of which some run."""
        for segment in self._order:
            for index, blocks in enumerate(self._step_blocks(segment, mode)):
                yield segment, blocks, index == 1

    def _step_blocks(self, segment: Segment, mode: Mode) -> list[tuple[Block, ...]]:
        """The blocks behind each of `_steps`."""
        if not self._routes(segment, mode):
            return [segment.blocks]
        *before, last = segment.blocks
        assert isinstance(last, RoutedBlock)
        if last.name not in self._parts:
            self._parts[last.name] = last.router(), last.experts()
        router, experts = self._parts[last.name]
        return [(*before, router), experts]

    def _before(self, shard: str) -> list[str]:
        """The shards that run before one."""
        names = list(self.members)
        return names[: names.index(shard)]

    def feeds(self, shard: str) -> dict[str, Truth]:
        """What the tensors that a shard takes from earlier ones should equal, by tensor name."""
        reads = needed(self.members[shard])
        return {
            name: truth
            for earlier in self._before(shard)
            for block in self.members[earlier]
            for name, truth in block.truths().items()
            if name in reads
        }

    def _silent_steps(self, segment: Segment, mode: Mode) -> Iterator[Step | Route]:
        """The calls of a segment in a mode where nobody reads the logits."""
        if "main" not in self.widths and self._fills(segment, mode):
            yield Step(shard=segment.shard, function=f"fill{segment.suffix}")
        elif self._silent(segment):
            yield from self._steps(segment, mode)

    def makers(self, shard: str) -> list[str]:
        """Earlier shards that make what a shard takes and no module of the Hugging Face model
        gives."""
        reads = needed(self.members[shard])
        return [
            earlier
            for earlier in self._before(shard)
            if any(
                reads & set(block.writes) - set(block.truths()) for block in self.members[earlier]
            )
        ]

    def _steps(self, segment: Segment, mode: Mode) -> Iterator[Step | Route]:
        """The calls of a segment in a mode."""
        name = "main" if "main" in self.widths else mode
        yield Step(shard=segment.shard, function=f"{name}{segment.suffix}")
        if self._routes(segment, mode):
            routed = segment.blocks[-1]
            assert isinstance(routed, RoutedBlock)
            modes = sorted(self.recipe.layout.routed, key=lambda m: self.widths[m])
            yield Route(
                shard=segment.shard,
                scores=routed.scores,
                experts=tuple(
                    tuple(f"expert-{index:02}-{m}{segment.suffix}" for m in modes)
                    for index in range(len(self._step_blocks(segment, mode)[1]))
                ),
            )

    @cached_property
    def widths(self) -> dict[str, int]:
        """Tokens per call by function name: one function per mode, or one `main` that a flexible
        shape makes fit all modes."""
        modes = self.recipe.tokens.by_mode()
        return (
            {"main": 1}
            if self.recipe.tokens.shapes == "range"
            else {str(m): t for m, t in modes.items()}
        )

    def _shard(self, name: str, blocks: Sequence[Block]) -> ShardPlan:
        kinds = {isinstance(block, Head) for block in blocks}
        return ShardPlan(
            name=name,
            kind="model" if len(kinds) == 2 else "head" if kinds == {True} else "layers",
            blocks=tuple(block.name for block in blocks),
            weight_bytes=sum(self._weight_bytes(block) for block in blocks),
            functions=tuple(graph.function for graph in self.graphs(name)),
        )

    def _weight_bytes(self, block: Block) -> int:
        formats = self.recipe.compression
        return sum(
            formats.format_for(weight.name, weight.kind).nbytes(weight.shape)
            if weight.kind
            else 2 * weight.elements
            for _, weight in block.weights()
        )


def chunk_bounds(layout: Layout, layers: int) -> list[int]:
    """The first layer of every chunk, and the number of layers."""
    if layout.cuts:
        if layout.cuts[-1] >= layers:
            raise CetaneError(f"layout.cuts: {layout.cuts[-1]}, but the model has {layers} layers")
        return [0, *layout.cuts, layers]
    count = layout.chunks or min(4, layers)
    if count > layers:
        raise CetaneError(f"layout.chunks = {count}: the model has {layers} layers")
    return [layers * i // count for i in range(count + 1)]


def needed(blocks: Sequence[Block]) -> set[str]:
    """The tensors that some of the blocks, in order, read before one of them writes them."""
    wanted: set[str] = set()
    written: set[str] = set()
    for block in blocks:
        wanted |= set(block.reads) - written
        written |= set(block.writes)
    return wanted
