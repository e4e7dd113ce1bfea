"""The execution of calls: it gathers inputs, calls functions, and stores outputs in their sinks."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

from cetane.bundle.tables import Tables
from cetane.engine.backend import Array, Arrays
from cetane.engine.call import Running, columns, hidden
from cetane.engine.host import host_input
from cetane.engine.memory import Memory
from cetane.engine.schedule import Steps
from cetane.engine.shards import OpenShards
from cetane.engine.states import OwnedStates
from cetane.schema.function import Function, Route, Step
from cetane.schema.interface import (
    FromCache,
    FromHistory,
    FromMatrix,
    FromTensor,
    Input,
    Kept,
    Sink,
    ToTensor,
    hidden_shape,
)

Watch = Callable[[Step | Route, str, Array, int], None]
"""Called with the step, the name and value of every output, and the call's number of tokens
without padding."""


class Execution:
    """Runs the calls of one sequence, which share its memory and its MLStates."""

    def __init__(
        self,
        functions: Mapping[tuple[str, str], Function],
        shards: OpenShards,
        tables: Tables,
        memory: Memory,
        watch: Sequence[Watch] = (),
    ) -> None:
        """`functions` are the plan's, by shard and name."""
        self.functions, self.shards, self.tables = functions, shards, tables
        self.memory, self.watch = memory, tuple(watch)
        self.states: dict[str, OwnedStates] = {}
        """MLStates, by the owner of their functions."""

    def width(self, steps: Steps, tokens: int, count: int) -> int:
        """The width of a call of `count` tokens: the smallest that all its functions have.

        It is at most `tokens`, their full width. Experts do not count: they choose their own width.
        """
        if count == tokens:
            return tokens
        fewer = [
            self.shards.narrower(step.shard, self.functions[step.shard, step.function])
            for own in steps.values()
            for step in own
            if isinstance(step, Step)
        ]
        widths = set.intersection(*map(set, fewer)) if fewer else set()
        return min((width for width in widths if width >= count), default=tokens)

    def step(self, step: Step | Route, running: Running) -> None:
        """Run one step of a call."""
        if isinstance(step, Route):
            with self.shards.route_clock(step, running.call.width):
                outputs = self._route(step, running)
            function = self.functions[step.shard, step.experts[0][0]]
        else:
            function = self.functions[step.shard, step.function]
            inputs = {item.name: self._input(item, running) for item in function.inputs}
            width = min(running.call.width, function.tokens)
            outputs = self._call(step.shard, function, inputs, width)
        for item in function.outputs:
            self._keep(item.sink, outputs[item.name], running)
        for watch in self.watch:
            for name, value in outputs.items():
                watch(step, name, value, len(running.call.tokens))

    def _route(self, route: Route, running: Running) -> Arrays:
        """Run the chosen experts, each on the columns of its tokens."""
        scores = columns(running.tensors[route.scores])[:, : len(running.call.tokens)]
        results: Arrays = {}
        if route.adds:
            for item in self.functions[route.shard, route.experts[0][0]].outputs:
                assert isinstance(item.sink, ToTensor)
                results[item.name] = columns(running.tensors[item.sink.name]).astype(np.float32)
        for expert, mine in chosen(route, scores):
            functions = [self.functions[route.shard, name] for name in route.experts[expert]]
            for function, taken in shared_out(mine, functions):
                inputs = {
                    item.name: self._some(self._input(item, running), taken, function.tokens)
                    for item in function.inputs
                }
                outputs = self._call(route.shard, function, inputs, function.tokens)
                for name, value in outputs.items():
                    made = columns(value)
                    if name not in results:
                        results[name] = np.zeros((len(made), running.call.width), value.dtype)
                    if route.adds:
                        results[name][:, taken] += made[:, : len(taken)]
                    else:
                        results[name][:, taken] = made[:, : len(taken)]
        order, dtype = running.call.order, self.shards.backend.dtype
        return {
            name: v.astype(dtype).reshape(hidden_shape(order, *v.shape))
            for name, v in results.items()
        }

    def _some(self, value: Array, taken: Array, width: int) -> Array:
        """The `taken` columns of a hidden tensor as a tensor of their own, zero-padded to
        `width`."""
        return hidden(columns(value)[:, taken], width, self.memory.order)

    def _input(self, item: Input, running: Running) -> Array:
        """The array for an input, from its source."""
        source = item.source
        if isinstance(source, FromTensor):
            return running.tensors[source.name]
        if isinstance(source, FromCache):
            return self.memory.cache(source, item.shape[-1])
        if isinstance(source, FromHistory):
            return self.memory.histories[source.name]
        if isinstance(source, FromMatrix):
            return self.memory.matrices[source.name].astype(self.shards.backend.dtype, copy=False)
        if item.name not in running.hosted:
            dtype = self.shards.backend.dtype
            running.hosted[item.name] = host_input(item, running.call, self.tables, dtype)
        return running.hosted[item.name]

    def _call(self, shard: str, function: Function, inputs: Arrays, width: int) -> Arrays:
        """Call a shard's function for `width` tokens, with the MLStates of this sequence.

        An expert has no MLStates, though other functions of its owner do.
        """
        if not function.states:
            return self.shards.call(shard, function, inputs, None, width)
        if function.owner not in self.states:
            self.states[function.owner] = OwnedStates(self.shards, shard)
        states = self.states[function.owner].of(function)
        return self.shards.call(shard, function, inputs, states, width)

    def _keep(self, sink: Sink, value: Array, running: Running) -> None:
        """Store an output in its sink, without padding."""
        if isinstance(sink, ToTensor):
            running.tensors[sink.name] = value
        elif isinstance(sink, Kept):
            if running.held:
                running.writes.append((sink, value))
            else:
                self.memory.write(sink, value, running.call, range(len(running.call.tokens)))
        elif running.logits is not None:
            running.logits.add(sink, value)

    def take(self, other: "Execution") -> None:
        """Continue from the memory and the MLStates of another sequence of this plan."""
        self.memory.take(other.memory)
        self.states = {owner: states.copied(self.shards) for owner, states in other.states.items()}

    def forget(self, shard: str) -> None:
        """Drop the caches that no later shard reads, and the MLStates of this shard."""
        names = self.shards.names
        later = names[names.index(shard) + 1 :]
        read = {
            item.source.name
            for (name, _), function in self.functions.items()
            for item in function.inputs
            if name in later and isinstance(item.source, FromCache)
        }
        caches = self.memory.caches
        self.memory.caches = {name: caches[name] for name in caches if name in read}
        for (name, _), function in self.functions.items():
            if name == shard:
                self.states.pop(function.owner, None)


def chosen(route: Route, scores: Array) -> Iterator[tuple[int, Array]]:
    """The places in `route.experts` that tokens choose, each with the columns of these tokens.

    `scores` is `(experts, n)`.
    """
    if route.adds:
        for number in range(len(route.experts)):
            own = scores[number * route.together : (number + 1) * route.together]
            yield number, np.flatnonzero(own.any(axis=0))
    else:
        choices = scores.argmax(axis=0)  # of equals, the first
        for number in np.unique(choices):
            yield number, np.flatnonzero(choices == number)


def shared_out(mine: Array, functions: Sequence[Function]) -> Iterator[tuple[Function, Array]]:
    """An expert's `functions`, ascending in width, each with the columns that its call takes of
    `mine (n,)`: the narrowest one that holds the rest, or the widest."""
    while len(mine):
        fitting = [function for function in functions if function.tokens >= len(mine)]
        function = fitting[0] if fitting else functions[-1]
        yield function, mine[: function.tokens]
        mine = mine[function.tokens :]


def run(
    work: Sequence[tuple[Execution, Sequence[Running]]],
    shards: OpenShards,
    only: Collection[str] | None = None,
    last: bool = False,
) -> None:
    """Run the calls of several sequences through all shards, or `only` some. Each shard opens once.

    All tokens are known, so a call need not wait for the last shard of the call before: it needs
    only the caches of its current shard. With `last`, no calls follow, so a finished shard drops
    its caches.
    """
    with shards.host_clock():
        for name in shards.names:
            if only is not None and name not in only:
                continue
            for execution, calls in work:
                for running in calls:
                    for step in running.steps.get(name, ()):
                        execution.step(step, running)
                    for act in running.then:
                        act()
                if last:
                    execution.forget(name)
            shards.leave(name)
