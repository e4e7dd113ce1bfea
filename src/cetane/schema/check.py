"""Checks that an engine can run a plan. Plans also come from manifests, which may be hostile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from cetane.schema.function import AdapterPlan, CapacityPlan, Function, ModePlan, Route, Step
from cetane.schema.interface import (
    Dtype,
    Embedding,
    FromCache,
    FromHistory,
    FromMatrix,
    FromTensor,
    Input,
    Mask,
    Position,
    PositionRows,
    Rotary,
    ToCache,
    ToChoice,
    ToLogits,
    ToTensor,
    WriteMask,
)
from cetane.schema.recipe import Mode
from cetane.schema.slots import PADDED, Slots

if TYPE_CHECKING:
    from cetane.schema.plan import Plan


def check_tables(plan: Plan) -> None:
    """Raise ValueError for a function, called or not, that takes rows of a table that is not
    there."""
    for (shard, name), function in plan.functions.items():
        for item in function.inputs:
            source = item.source
            if isinstance(source, Rotary) and source.table not in plan.rotary:
                raise ValueError(f"{shard}/{name}: no rotary table {source.table}")
            if not isinstance(source, Embedding | PositionRows):
                continue
            if source.table not in plan.tables:
                raise ValueError(f"{shard}/{name}: no table {source.table}")
            least = ("context", plan.recipe.cache.context)
            if isinstance(source, Embedding):
                least = ("vocabulary", plan.vocab)
            if plan.tables[source.table].rows < least[1]:
                where = f"{shard}/{name}: table {source.table}"
                raise ValueError(f"{where} has fewer rows than the {least[0]}, {least[1]}")


def check_capacities(plan: Plan) -> None:
    """Raise ValueError unless the caches of every capacity can grow into those of the next, between
    any two calls."""
    tokens = tuple(capacity.tokens for capacity in plan.smaller)
    if tokens != plan.recipe.cache.capacities:
        raise ValueError(f"capacities {tokens}, but the recipe has {plan.recipe.cache.capacities}")
    made = {function.capacity for function in plan.functions.values()} - {None}
    if not made <= set(tokens):
        raise ValueError("a function was made for a capacity that the plan lacks")
    for capacity in plan.smaller:
        check_capacity(plan, capacity)
    shapes: dict[str, tuple[int, ...]] = {}
    for function in plan.functions.values():
        for item in function.inputs:
            if isinstance(item.source, FromCache):
                shape = shapes.setdefault(item.source.name, item.shape[:-1])
                if shape != item.shape[:-1]:
                    raise ValueError(f"{item.source.name} has two shapes, which differ in more "
                                     "than their slots")  # fmt: skip


def check_capacity(plan: Plan, capacity: CapacityPlan) -> None:
    """Raise ValueError for a smaller capacity with other slots, modes or adapters than follow from
    the context's, and for calls that an engine cannot run."""
    tokens = capacity.tokens
    if capacity.caches != {name: slots.at(tokens) for name, slots in plan.caches.items()}:
        raise ValueError(f"the slots of capacity {tokens} do not follow from the context's")
    check_caches(capacity.caches, [f for f in plan.functions.values() if f.capacity == tokens])
    if capacity.adapters.keys() != plan.adapters.keys():
        raise ValueError(f"the capacity {tokens} has other adapters than the context")
    for adapter, modes in ((None, capacity.modes), *capacity.adapters.items()):
        if widths_of(modes) != widths_of(plan.modes):
            raise ValueError(f"the capacity {tokens} has other modes than the context")
        for mode, steps in modes.items():
            ModeCheck(plan, mode, adapter, tokens).steps(steps)
            check_caches(capacity.caches, list(called(plan, steps)))


def widths_of(modes: Mapping[Mode, ModePlan]) -> dict[Mode, int]:
    """The tokens of a call of every mode."""
    return {mode: steps.tokens for mode, steps in modes.items()}


def called(plan: Plan, mode: ModePlan) -> Iterator[Function]:
    """The functions of the steps of a mode, without experts, which have no caches."""
    for step in (*mode.silent, *mode.steps):
        if isinstance(step, Step):
            yield plan.functions[step.shard, step.function]


def check_adapter(plan: Plan, name: str, adapter: AdapterPlan) -> None:
    """Raise ValueError unless an engine can change to and from an adapter between any two calls."""
    if widths_of(adapter.modes) != widths_of(plan.modes):
        raise ValueError(f"the adapter {name} has other modes than the base")
    for mode, steps in adapter.modes.items():
        ModeCheck(plan, mode, name).steps(steps)


class ModeCheck:
    """Follows the steps of one mode. Raises ValueError at a step that an engine cannot run."""

    def __init__(
        self,
        plan: Plan,
        mode: Mode,
        adapter: str | None = None,
        capacity: int | None = None,
    ) -> None:
        """The mode's functions may include only this adapter, and be made only for this
        capacity."""
        self.plan, self.mode, self.adapter, self.capacity = plan, mode, adapter, capacity
        self.channels: dict[str, int] = {}
        """Channels of each tensor written so far, by its name."""
        self.rows = 0
        """Rows of the head that have logits so far."""

    def steps(self, mode: ModePlan) -> None:
        """Follow a mode's silent calls, then all calls, which must give every row a logit."""
        self.follow(mode.silent)
        self.channels, self.rows = {}, 0
        self.follow(mode.steps)
        if self.rows != self.plan.rows:
            raise ValueError(f"{self.mode}: {self.rows} logits for {self.plan.rows} tokens")

    def follow(self, steps: Sequence[Step | Route]) -> None:
        order = list(self.plan.by_name)  # an engine opens each shard once, in this order
        called = [order.index(step.shard) for step in steps if step.shard in order]
        if called != sorted(called):
            raise ValueError(f"{self.mode}: steps are not in the order of the shards")
        for step in steps:
            if isinstance(step, Route):
                self.route(step)
            else:
                self.call(self.find(step.shard, step.function), step.shard)

    def find(self, shard: str, name: str) -> Function:
        function = self.plan.functions.get((shard, name))
        if function is None:
            raise ValueError(f"{self.mode} calls {shard}/{name}: no such function")
        if function.adapter not in (None, self.adapter):
            raise ValueError(
                f"{self.mode} calls {shard}/{name}, which includes the adapter {function.adapter}"
            )
        if function.capacity not in (None, self.capacity):
            raise ValueError(
                f"{self.mode} calls {shard}/{name}, of the capacity {function.capacity}"
            )
        return function

    def call(self, function: Function, shard: str) -> None:
        kept = set()
        rows: tuple[int, int] | None = None
        for item in function.inputs:
            source = item.source
            if isinstance(source, FromTensor) and source.name not in self.channels:
                raise ValueError(f"{self.mode}: nothing writes {item.name} of {shard}")
            if isinstance(source, FromCache | FromHistory | FromMatrix):
                kept.add((source.host, source.name))
        for output in function.outputs:
            sink = output.sink
            head = self.plan.by_name[shard].kind == "head"
            if head and not isinstance(sink, ToLogits | ToChoice):
                raise ValueError(f"{self.mode}: {shard}, a head, writes more than logits")
            if isinstance(sink, ToTensor):
                self.channels[sink.name] = prod(output.shape) // function.tokens
            elif isinstance(sink, ToChoice) and sink.part == "row":
                if output.shape[0] != (1 if sink.block == 1 else 2):
                    raise ValueError(f"{self.mode}: {output.name} of {shard} has no block and row")
                rows = sink.start, sink.stop
            elif isinstance(sink, ToLogits | ToChoice):
                if isinstance(sink, ToChoice) and rows != (sink.start, sink.stop):
                    raise ValueError(f"{self.mode}: no row precedes {output.name} of {shard}")
                if sink.start != self.rows or sink.stop <= self.rows:
                    raise ValueError(f"{self.mode}: logits do not cover the vocabulary in order")
                self.rows = sink.stop
            elif (sink.host, sink.name) not in kept:
                raise ValueError(f"{self.mode}: {shard} writes a {sink.host} that it does not read")

    def route(self, route: Route) -> None:
        if -(-self.channels.get(route.scores, 0) // route.together) != len(route.experts):
            raise ValueError(f"{self.mode}: no {route.scores} for {len(route.experts)} experts")
        if route.together > 1 and not route.adds:
            raise ValueError(
                f"{self.mode}: experts of {route.shard} share functions, but their outputs are not "
                "added"
            )
        written = set()
        before, after = self.channels, dict(self.channels)
        for names in route.experts:
            functions = [self.find(route.shard, name) for name in names]
            widths = [function.tokens for function in functions]
            if not widths or widths != sorted(widths):
                raise ValueError(f"{self.mode}: experts of {route.shard} do not ascend in width")
            for function in functions:
                sources = {item.source.host for item in function.inputs}
                sinks = {item.sink.host for item in function.outputs}
                if sources | sinks != {"tensor"}:
                    raise ValueError(f"{self.mode}: an expert of {route.shard} needs the host")
                self.channels = dict(before)  # an expert cannot read what another one writes
                self.call(function, route.shard)
                changed = {n for n in before if self.channels[n] != before[n]}
                if route.adds and (changed or self.channels.keys() != before.keys()):
                    raise ValueError(f"{self.mode}: experts of {route.shard} add to no tensor")
                after |= self.channels
                written.add(
                    frozenset(
                        (o.name, o.sink, prod(o.shape) // function.tokens) for o in function.outputs
                    )
                )
        if len(written) != 1:
            raise ValueError(f"{self.mode}: experts of {route.shard} write different tensors")
        self.channels = after


def check_caches(caches: Mapping[str, Slots], functions: Collection[Function]) -> None:
    """Check every mask, cache, write mask and state against the slots of its group.

    Raises ValueError for an unknown group, and for a length that differs from the group's slots.
    Raises it too if a group's functions differ in key/value heads, and for a cache of two types. A
    shard that was made for another context would run, and give wrong tokens.
    """
    for slots in caches.values():
        if slots.sinks >= slots.count:
            raise ValueError(
                f"{slots.sinks} of {slots.count} slots are never used again, so later tokens have "
                "none"
            )
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for function in functions:
        for item in function.inputs:
            if isinstance(item.source, FromCache):
                groups[item.source.name].add(item.source.group)
    # Heads and their channels, by group and dtype: the scales of int8 caches have one channel.
    heads: dict[tuple[str, Dtype], tuple[int, ...]] = {}
    types: dict[str, Dtype] = {}
    for function in functions:
        where = f"{function.owner}/{function.name}"
        for output in function.outputs:
            sink = output.sink
            if isinstance(sink, ToCache) and groups.get(sink.name) != {sink.group}:
                raise ValueError(f"{where}: {output.name} is not of the group {sink.group}")
        for item in function.inputs:
            check_length(item, function.tokens, caches, where)
            source = item.source
            if isinstance(source, FromCache):
                shared = heads.setdefault((source.group, item.dtype), item.shape[1:3])
                if len(item.shape) != 4 or item.shape[1:3] != shared:
                    raise ValueError(f"{where}: {item.name} has shape {item.shape}")
                if types.setdefault(source.name, item.dtype) != item.dtype:
                    raise ValueError(f"{where}: {item.name} is {item.dtype}, not as elsewhere")
        check_states(function, caches, where)


def check_length(item: Input, tokens: int, caches: Mapping[str, Slots], where: str) -> None:
    """Raise ValueError for an input whose last axis does not fit the slots of its group, in a call
    of `tokens` tokens. Raise it also for an int8 input that is no cache."""
    source = item.source
    if item.dtype == "int8" and not isinstance(source, FromCache):
        raise ValueError(f"{where}: {item.name} is int8, but not a cache")
    if not isinstance(source, Mask | WriteMask | Position | FromCache):
        return
    if source.group not in caches:
        raise ValueError(f"{where}: no cache group {source.group}")
    slots = caches[source.group]
    if isinstance(source, Mask):
        length = slots.visible(tokens)
    else:
        length = 1 if isinstance(source, Position) else slots.count
    if not item.shape:
        raise ValueError(f"{where}: {item.name} has no shape")
    if item.shape[-1] != length:
        raise ValueError(f"{where}: {item.name} is {item.shape[-1]} long, not {length}")


def check_states(function: Function, caches: Mapping[str, Slots], where: str) -> None:
    """Raise ValueError for a state that is not as long as its group's slots. One that all groups
    share has at least those of the groups that the function writes."""
    used = [caches[i.source.group].count for i in function.inputs
            if isinstance(i.source, Position)]  # fmt: skip
    for state in function.states:
        if not state.shape:
            raise ValueError(f"{where}: {state.name} has no shape")
        if state.name == PADDED and state.shape[-1] < max(used, default=0):
            raise ValueError(f"{where}: {state.name} is {state.shape[-1]} long, not {max(used)}")
        group = caches.get(state.name.removesuffix("_kv"))
        if group is not None and state.shape[-1] != group.count:
            raise ValueError(f"{where}: {state.name} is {state.shape[-1]} long, not {group.count}")
