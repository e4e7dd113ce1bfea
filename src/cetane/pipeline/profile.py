"""The profile of a run: the figures that the published ports print."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from cetane.engine.engine import Engine
from cetane.engine.shards import OpenShards
from cetane.pipeline.completion import Completion
from cetane.schema.function import ModePlan
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode


@dataclass(frozen=True)
class ShardLoad:
    """The milliseconds of opening a shard: first in this process, and again."""

    cold_ms: float
    warm_ms: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a run went. A figure is None if the run made no such call.

    Times of a token are those of decode calls: medians of every step, added up.
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
    plan = engine.plan
    decode = smallest_called(plan, engine.shards, "decode")
    verify = smallest_called(plan, engine.shards, "verify")
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


def smallest_called(plan: Plan, shards: OpenShards, mode: Mode) -> dict[str, float]:
    """Milliseconds of a mode's call in each shard, at the smallest capacity at which it was called;
    empty if it was not.

    At each capacity, the base comes before its adapters.
    """
    ways = [modes for one in plan.capacities for modes in (one.modes, *one.adapters.values())]
    called = (by_shard(modes[mode], shards) for modes in ways if mode in modes)
    return next(filter(None, called), {})


def by_shard(mode: ModePlan, shards: OpenShards) -> dict[str, float]:
    """Milliseconds of a mode's call in each shard: medians of its steps; empty if one was not
    called.

    The experts that a route calls in a step count together.
    """
    made: dict[str, float] = {}
    for step in mode.steps:
        latest = shards.latest(step, mode.tokens)
        if not latest:
            return {}
        made[step.shard] = made.get(step.shard, 0.0) + 1e3 * median(latest)
    return made


def loads(engine: Engine) -> dict[str, ShardLoad]:
    """The loads of the shards that were opened."""
    made = {}
    for name, cold in engine.shards.loads.items():
        started = time.perf_counter()
        engine.backend.open(name)
        made[name] = ShardLoad(1e3 * cold, 1e3 * (time.perf_counter() - started))
    return made
