"""The profile of a run: the figures that the published ports print."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from cetane.engine.engine import Engine
from cetane.pipeline.language_model import Completion
from cetane.schema.function import Route, Step
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

Times = Mapping[tuple[str, str], Sequence[float]]
"""Seconds of calls, by shard and function."""


@dataclass(frozen=True)
class ShardLoad:
    """The milliseconds of opening a shard: first in this process, and again."""

    cold_ms: float
    warm_ms: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a run went. A figure is None if the run made no such call.

    Times of a token are those of decode calls: medians of every function, added up.
    """

    decode_tok_s: float | None
    """Tokens per second of decoding, with the host's work, sampling included."""
    forward_tok_s: float | None
    """Tokens per second of the programs alone."""
    layers_ms: float | None
    """A token in the shards of layers. A single shard with its head counts here."""
    head_ms: float | None
    """A token in the head's shards."""
    layer_ms: float | None
    """`layers_ms`, divided by the model's layers."""
    verify_tokens: int | None
    verify_ms: float | None
    """A verifying call of the bundle's width, `verify_tokens`."""
    load: Mapping[str, ShardLoad]
    """By shard."""
    seconds: Mapping[str, float]
    """Seconds of the whole run: in each shard, in opening shards (`load`), by the host (`host`)."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def profile(engine: Engine, completion: Completion | None = None) -> Profile:
    """The profile of an engine that has run. Opens every shard that it used once more."""
    plan, times = engine.plan, engine.shards.times
    decode = by_shard(smallest_called(plan, times, "decode"), times)
    verify = by_shard(smallest_called(plan, times, "verify"), times)
    kinds = {shard.name: shard.kind for shard in plan.shards}
    layers = [ms for name, ms in decode.items() if kinds[name] != "head"]
    head = [ms for name, ms in decode.items() if kinds[name] == "head"]
    return Profile(
        decode_tok_s=None if completion is None else completion.tokens_per_second,
        forward_tok_s=1e3 / sum(decode.values()) if decode else None,
        layers_ms=sum(layers) if layers else None,
        head_ms=sum(head) if head else None,
        layer_ms=sum(layers) / plan.layers if layers else None,
        verify_tokens=plan.modes["verify"].tokens if verify else None,
        verify_ms=sum(verify.values()) if verify else None,
        load=loads(engine),
        seconds=dict(engine.seconds),
    )


def smallest_called(plan: Plan, times: Times, mode: Mode) -> Sequence[Step | Route]:
    """The steps of a mode at the smallest capacity at which it was called; none if it was not.

    At each capacity, those of the base come before those with an adapter.
    """
    ways = [modes for one in plan.capacities for modes in (one.modes, *one.adapters.values())]
    steps = [modes[mode].steps for modes in ways if mode in modes]
    return next((called for called in steps if by_shard(called, times)), ())


def by_shard(steps: Sequence[Step | Route], times: Times) -> dict[str, float]:
    """Milliseconds of these steps in each shard; empty if one was not called.

    Of a route, the median over all calls of its experts counts once: a decode step calls one.
    """
    made: dict[str, float] = {}
    for step in steps:
        called = calls_of(step, times)
        if not called:
            return {}
        made[step.shard] = made.get(step.shard, 0.0) + 1e3 * median(called)
    return made


def calls_of(step: Step | Route, times: Times) -> Sequence[float]:
    """The seconds of a step's calls."""
    if isinstance(step, Step):
        return times.get((step.shard, step.function), [])
    return [
        s for group in step.experts for name in group for s in times.get((step.shard, name), [])
    ]


def loads(engine: Engine) -> dict[str, ShardLoad]:
    """The loads of the shards that were opened."""
    made = {}
    for name, cold in engine.shards.loads.items():
        started = time.perf_counter()
        engine.backend.open(name)
        made[name] = ShardLoad(1e3 * cold, 1e3 * (time.perf_counter() - started))
    return made
