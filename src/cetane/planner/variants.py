"""Variants of a plan's functions: those of smaller capacities, and those with an adapter."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from cetane.planner.calls import Calls
from cetane.planner.graphs import FunctionGraph, Graphs
from cetane.planner.layout import Arrangement
from cetane.schema.function import Route, Step, at_capacity, with_adapter


class Variants:
    """The functions of every shard with their variants, and the steps that call a variant.

    A capacity or an adapter has functions only where they differ from the base's at the context.
    Elsewhere its steps call those.
    """

    def __init__(
        self,
        arrangement: Arrangement,
        calls: Calls,
        context: Graphs,
        smaller: Mapping[int, Graphs],
        adapters: Collection[str],
    ) -> None:
        """`context` makes the graphs at the context, `smaller` those of each smaller capacity."""
        self.arrangement, self.calls = arrangement, calls
        self.context, self.smaller, self.adapters = context, smaller, adapters
        self._at_capacity: dict[tuple[str, int], frozenset[str]] = {}
        self._changed: dict[tuple[str, str], frozenset[str]] = {}

    def graphs(self, shard: str) -> list[FunctionGraph]:
        """Every function of a shard: the base's at the context, those of smaller capacities, then
        those that include an adapter."""
        return self.with_adapters(self._of_base(shard))

    def with_adapters(self, graphs: list[FunctionGraph]) -> list[FunctionGraph]:
        """Graphs of the base, then those that adapters change, including each adapter."""
        return graphs + [
            graph.including(name)
            for name in self.adapters
            for graph in graphs
            if graph.changed_by(name)
        ]

    def step(self, step: Step | Route, capacity: int | None, adapter: str | None) -> Step | Route:
        """A step of the base at the context, with other functions where there are such: those of a
        smaller capacity, and of an adapter. None stands for the context, and for the base."""
        if capacity is not None:
            own = self._names_at(step.shard, capacity)
            names = {name: at_capacity(name, capacity) for name in called_by(step)}
            step = renamed(step, {old: new for old, new in names.items() if new in own})
        if adapter is not None:
            changed = self.changed_by(step.shard, adapter)
            step = renamed(step, {name: with_adapter(name, adapter) for name in changed})
        return step

    def changed_by(self, shard: str, adapter: str) -> frozenset[str]:
        """The names of those of the base's functions in a shard that an adapter changes."""
        key = shard, adapter
        if key not in self._changed:
            graphs = self._of_base(shard)
            self._changed[key] = frozenset(
                graph.function.name for graph in graphs if graph.changed_by(adapter)
            )
        return self._changed[key]

    def _of_base(self, shard: str) -> list[FunctionGraph]:
        graphs = self._made_by(self.context, shard)
        for capacity in self.smaller:
            graphs += self._of_capacity(shard, capacity)
        return graphs

    def _of_capacity(self, shard: str, capacity: int) -> list[FunctionGraph]:
        """The functions of a smaller capacity that differ from the context's."""
        large, small = (
            self._made_by(maker, shard) for maker in (self.context, self.smaller[capacity])
        )
        return [
            replace(own, function=own.function.at(capacity))
            for of_context, own in zip(large, small, strict=True)
            if own.function != of_context.function
        ]

    def _made_by(self, maker: Graphs, shard: str) -> list[FunctionGraph]:
        return [
            graph
            for segment in self.arrangement.segments[shard]
            for name, tokens in self.calls.widths.items()
            for graph in maker.of_segment(segment, name, tokens)
        ]

    def _names_at(self, shard: str, capacity: int) -> frozenset[str]:
        """The names of a shard's functions for a smaller capacity."""
        key = shard, capacity
        if key not in self._at_capacity:
            graphs = self._of_capacity(shard, capacity)
            self._at_capacity[key] = frozenset(graph.function.name for graph in graphs)
        return self._at_capacity[key]


def called_by(step: Step | Route) -> Iterator[str]:
    """The names of the functions that a step can call."""
    if isinstance(step, Step):
        yield step.function
    else:
        for functions in step.experts:
            yield from functions


def renamed(step: Step | Route, names: Mapping[str, str]) -> Step | Route:
    """A step with other names of its functions, where `names` has one."""
    if isinstance(step, Step):
        return step.model_copy(update={"function": names.get(step.function, step.function)})
    experts = tuple(tuple(names.get(name, name) for name in one) for one in step.experts)
    return step.model_copy(update={"experts": experts})
