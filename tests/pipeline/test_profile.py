"""Where the time of a call goes, by hand."""

from typing import Any

import pytest

from cetane.engine.shards import OpenShards
from cetane.pipeline.profile import by_shard
from cetane.schema.function import ModePlan, Route, Step
from cetane.schema.recipe import Mode

EXPERTS = tuple((f"expert-{i:02}-decode", f"expert-{i:02}-verify") for i in range(8))
ROUTE = Route(shard="chunk", scores="scores", adds=True, experts=EXPERTS)


def mode(name: Mode, tokens: int) -> ModePlan:
    return ModePlan(tokens=tokens, steps=(Step(shard="chunk", function=name), ROUTE), silent=())


def test_all_experts_of_a_step_count() -> None:
    """A token calls two of eight experts, and a verifying call five of them for longer."""
    backend: Any = None
    shards = OpenShards(backend, ["chunk"], "")
    assert by_shard(mode("decode", 1), shards) == {}
    for name, tokens, steps, called in (
        ("decode", 1, 4, [2, 2]),
        ("verify", 4, 9, [6, 2, 6, 6, 2]),
    ):
        for _ in range(steps):
            shards.times["chunk", name].append(0.001)
            with shards.route_clock(ROUTE, tokens):
                shards.seconds["chunk"] += sum(called) / 1e3
    assert by_shard(mode("decode", 1), shards) == pytest.approx({"chunk": 1 + 4})
    assert by_shard(mode("verify", 4), shards) == pytest.approx({"chunk": 1 + 22})
    shards.restart_clocks()
    assert not shards.routes
