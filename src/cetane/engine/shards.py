"""The open shards of a plan: opened on first use, with the time of all calls."""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from typing import Any

from cetane.engine.backend import Arrays, Backend, NarrowerShard, OpenShard
from cetane.errors import CetaneError
from cetane.schema.function import Function, Route, Step

RECENT = 1000
"""How many of a function's latest calls keep their times: a server makes calls for days."""


@lru_cache(maxsize=1024)  # every output of every call asks
def sizes_of(shape: tuple[int, ...], missing: int) -> set[int]:
    """The numbers of elements that an output may have in a call with `missing` fewer tokens.

    Either it has all elements of `shape`, or one axis is shorter by `missing`. That axis may be
    longer than the tokens, since a window can precede them.
    """
    whole = prod(shape)
    return {whole, *(whole // size * (size - missing) for size in shape if size > missing)}


class OpenShards:
    """The shards of a plan on a backend, by name, in the order of their calls.

    A shard stays open. If shards are not `resident`, `leave` closes it, so that only one is in
    memory at a time.
    """

    def __init__(
        self,
        backend: Backend,
        names: Sequence[str],
        hint: str,
        resident: bool = True,
        flexible: bool = False,
    ) -> None:
        """`hint` is the advice for a package that differs from its plan. `flexible`: outputs may
        have other widths than in the plan, as with flexible shapes."""
        self.backend, self.names, self.hint = backend, tuple(names), hint
        self.resident, self.flexible = resident, flexible
        self.seconds: dict[str, float] = defaultdict(float)
        """Seconds spent in each shard, in opening shards (`load`), and by the host (`host`)."""
        self.times: dict[tuple[str, str], deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        """Seconds of the latest calls, by shard and function."""
        self.routes: dict[tuple[str, str, int], deque[float]] = defaultdict(
            lambda: deque(maxlen=RECENT)
        )
        """Seconds of the latest steps of routes, all experts of a step together, by shard, function
        of the first expert and width of the call."""
        self.loads: dict[str, float] = {}
        """Seconds of the first opening of each shard."""
        self._open: dict[str, OpenShard] = {}
        self._narrower: dict[tuple[str, str], dict[int, str]] = {}

    def open(self, name: str) -> OpenShard:
        """A shard, loaded on first use."""
        if name not in self._open:
            started = time.perf_counter()
            with self._clock("load"):
                self._open[name] = self.backend.open(name)
            self.loads.setdefault(name, time.perf_counter() - started)
        return self._open[name]

    def leave(self, name: str) -> None:
        """Called when no more calls of a run need the shard; closes it if not `resident`."""
        if not self.resident:
            self._open.pop(name, None)

    def make_state(self, name: str, function: Function) -> Any:
        """New MLStates for the functions of one owner."""
        shard = self.open(name)
        with self._clock("load"), self._named(name):
            return shard.make_state(function.name)

    def narrower(self, name: str, function: Function) -> dict[int, str]:
        """The names of a function's narrower forms, by their number of tokens, if it has any."""
        key = name, function.name
        if key not in self._narrower:
            shard = self.open(name) if self.resident and self.backend.by_rows else None
            with self._named(name):
                self._narrower[key] = (
                    shard.narrower(function.name) if isinstance(shard, NarrowerShard) else {}
                )
        return self._narrower[key]

    def call(
        self, name: str, function: Function, inputs: Arrays, state: Any, width: int | None = None
    ) -> Arrays:
        """Run a function of a shard, in its form for `width` tokens if that is given. Raises
        CetaneError if it fails, or if its outputs do not fit the plan."""
        shard, tokens = self.open(name), function.tokens
        width = tokens if width is None else width
        called = function.name if width == tokens else self.narrower(name, function)[width]
        before = self.seconds[name]
        with self._clock(name), self._named(name):
            outputs = shard.call(called, inputs, state)
        self.times[name, called].append(self.seconds[name] - before)
        for item in function.outputs:  # plans and packages are not trusted
            value = outputs.get(item.name)
            sizes = sizes_of(item.shape, tokens - width)
            if value is None or not (self.flexible or value.size in sizes):
                raise CetaneError(
                    f"{name}/{function.name} does not give the {item.name} of its plan", self.hint
                )
        return outputs

    def latest(self, step: Step | Route, tokens: int) -> Sequence[float]:
        """Seconds of the latest calls of a step, in calls of `tokens` tokens."""
        if isinstance(step, Step):
            return self.times.get((step.shard, step.function), ())
        return self.routes.get((step.shard, step.experts[0][0], tokens), ())

    def restart_clocks(self) -> None:
        """Set the time of all calls to zero; the time of loading stays."""
        loading = self.seconds["load"]
        self.seconds.clear()
        self.times.clear()
        self.routes.clear()
        self.seconds["load"] = loading

    @contextmanager
    def route_clock(self, route: Route, tokens: int) -> Iterator[None]:
        """A context: the calls of experts in it are one step of a route, in a call of `tokens`."""
        before = self.seconds[route.shard]
        yield
        spent = self.seconds[route.shard] - before
        self.routes[route.shard, route.experts[0][0], tokens].append(spent)

    @contextmanager
    def host_clock(self) -> Iterator[None]:
        """A context: time in it outside of shards counts as the host's."""
        before = self._in_shards()
        started = time.perf_counter()
        yield
        spent = time.perf_counter() - started
        self.seconds["host"] += spent - (self._in_shards() - before)

    def _in_shards(self) -> float:
        return sum(seconds for name, seconds in self.seconds.items() if name != "host")

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        """A context whose errors name the shard, as the path of its package does."""
        try:
            yield
        except CetaneError as error:
            if name in error.message:
                raise
            raise CetaneError(f"{name}: {error.message}", error.hint) from error

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - started
