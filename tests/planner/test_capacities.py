"""Plans of several capacities: which functions they add, and what a hostile one cannot do."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families import gemma_models

from cetane.errors import CetaneError
from cetane.hardware.chips import find_chip
from cetane.perf.capacities import capacity_costs
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.plan import Plan
from cetane.schema.recipe import load_recipe, parse_recipe, recipe_files
from cetane.schema.slots import CONTRACTS

WIDE = 256


def recipe(contract: str = "readonly", capacities: tuple[int, ...] = (32, 64), **cache: Any) -> Any:
    content = {
        "name": "test",
        "layout": {"kind": "chunks", "chunks": 2},
        "cache": {"contract": contract, "context": WIDE, "capacities": capacities} | cache,
        "tokens": {"verify": 4, "prefill": 8},
    }
    return parse_recipe(content, "test")


@pytest.fixture(scope="module")
def checkpoint() -> InMemoryCheckpoint:
    return InMemoryCheckpoint(build_model("llama"))


@pytest.fixture(scope="module")
def planned(checkpoint: InMemoryCheckpoint) -> Callable[..., Plan]:
    return lambda *args, **cache: Planner(checkpoint, recipe(*args, **cache)).plan()


@pytest.mark.parametrize("contract", CONTRACTS)
def test_only_what_keeps_caches_has_functions_for_each_capacity(planned, contract: str) -> None:
    plan = planned(contract)
    layers, head = plan.shards[0], plan.shards[-1]
    assert [f.name for f in head.functions] == ["decode", "verify", "prefill"]
    assert [f.name for f in layers.functions][3:] == [
        f"{mode}-c{size}" for size in (32, 64) for mode in ("decode", "verify", "prefill")
    ]
    assert [one.tokens for one in plan.capacities] == [32, 64, WIDE]
    calls = [one.modes["decode"].steps for one in plan.capacities]
    assert [step.function for steps in calls for step in steps] == [
        *["decode-c32"] * 2, "decode", *["decode-c64"] * 2, "decode", *["decode"] * 3,
    ]  # fmt: skip
    assert plan.weight_bytes == planned(contract, ()).weight_bytes


def test_a_plan_without_capacities_says_nothing_of_them(planned) -> None:
    content = planned("readonly", ()).model_dump(mode="json")
    assert "smaller" not in content
    assert "capacities" not in content["recipe"]["cache"]
    assert all("capacity" not in f for shard in content["shards"] for f in shard["functions"])


def test_the_plan_of_one_capacity_is_that_of_its_own_context(planned) -> None:
    small, alone = planned().at(32), planned("readonly", (), context=32)
    assert small.caches == alone.caches
    assert small.recipe.cache == alone.recipe.cache
    shapes = [
        [
            [item.shape for item in plan.functions[step.shard, step.function].inputs]
            for step in plan.modes["prefill"].steps
        ]
        for plan in (small, alone)
    ]
    assert shapes[0] == shapes[1]
    with pytest.raises(CetaneError, match="no capacity 48; known: 32, 64, 256"):
        planned().at(48)


def test_windows_keep_their_slots_at_every_capacity() -> None:
    checkpoint = InMemoryCheckpoint(gemma_models.build_gemma3())
    wanted = gemma_models.recipe(context=128, capacities=(64,), layout={"kind": "per-layer"})
    plan = Planner(checkpoint, wanted).plan()
    sliding = {name for name, slots in plan.caches.items() if slots.limited}
    assert sliding
    (small,) = plan.smaller
    assert {n: small.caches[n] for n in sliding} == {n: plan.caches[n] for n in sliding}
    grown = [s.name for s in plan.shards if any(f.capacity for f in s.functions)]
    full = [s.name for s in plan.shards if any("full" in i.name for i in s.functions[0].inputs)]
    assert grown == full and len(grown) < len(plan.shards) - 1  # one shard is the head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache.capacities": [64, 32]}, "not in ascending order"),
        ({"cache.capacities": [32, 32]}, "not in ascending order"),
        ({"cache.capacities": [WIDE]}, "not in ascending order"),
        ({"cache.capacities": [2 * WIDE]}, "beyond the context"),
        ({"cache.capacities": [40]}, "multiples of 32"),
        ({"cache.capacities": [0]}, "greater than or equal to 32"),
        ({"tokens.prefill": 48}, "a call of 48 tokens does not fit a capacity of 32"),
        ({"tokens.shapes": "range"}, "cache.capacities needs static shapes"),
    ],
)
def test_recipes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        override(recipe(), changes)


def test_a_recipe_file_says_them(tmp_path: Path) -> None:
    for name, write in recipe_files(recipe()).items():
        write(tmp_path / name)
    assert load_recipe(str(tmp_path / "recipe.toml")) == recipe()
    assert "compression" not in (tmp_path / "recipe.toml").read_text(), "defaults are left out"


def tampered(plan: Plan, change: Callable[[dict[str, Any]], None]) -> None:
    content = plan.model_dump(mode="json")
    change(content)
    Plan.model_validate(content)


def wrong_slots(content: dict[str, Any]) -> None:
    content["smaller"][0]["caches"]["kv"]["count"] = 64


def wrong_function(content: dict[str, Any]) -> None:
    content["smaller"][0]["modes"]["decode"]["steps"][0]["function"] = "decode-c64"


def the_contexts_function(content: dict[str, Any]) -> None:
    content["smaller"][0]["modes"]["decode"]["steps"][0]["function"] = "decode"


def missing_mode(content: dict[str, Any]) -> None:
    del content["smaller"][1]["modes"]["verify"]


def missing_capacity(content: dict[str, Any]) -> None:
    del content["smaller"][0]


def other_heads(content: dict[str, Any]) -> None:
    for function in content["shards"][0]["functions"]:
        if function["name"].endswith("-c64"):
            for item in function["inputs"]:
                if item["source"]["host"] == "cache":
                    item["shape"][1] += 1


def uncalled_of_no_group(content: dict[str, Any]) -> None:
    (function,) = [f for f in content["shards"][0]["functions"] if f["name"] == "decode-c32"]
    extra = deepcopy(function) | {"name": "uncalled"}
    next(i for i in extra["inputs"] if i["source"]["host"] == "mask")["source"]["group"] = "no"
    content["shards"][0]["functions"].append(extra)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_slots, "do not follow from the context's"),
        (wrong_function, "of the capacity 64"),
        (the_contexts_function, "long, not"),
        (missing_mode, "has other modes than the context"),
        (missing_capacity, "but the recipe has"),
        (other_heads, "two shapes|has shape"),
        (uncalled_of_no_group, "uncalled: no cache group no"),
    ],
)
def test_a_manifest_whose_caches_cannot_grow(planned, change, message: str) -> None:
    tampered(planned(), lambda _: None)
    with pytest.raises(ValidationError, match=message):
        tampered(planned(), change)


def test_the_cost_of_every_capacity(checkpoint: InMemoryCheckpoint) -> None:
    planner = Planner(checkpoint, recipe())
    predictor = Predictor(find_chip("m4-max"))
    small, middle, largest = capacity_costs(predictor, planner)
    assert [c.tokens for c in (small, middle, largest)] == [32, 64, WIDE]
    assert [c.functions for c in (small, middle, largest)] == [6, 6, 9]
    assert small.decode.ms < middle.decode.ms < largest.decode.ms
    alone = Planner(checkpoint, recipe(capacities=(), context=32))
    assert small.decode.ms == pytest.approx(predictor.predict(alone, "decode").ms)
    # two layers of keys and values, two heads of 16 channels, fp16: 256 bytes a slot and layer
    nbytes = 2 * 2 * 2 * 16 * 2 * (32 + 64)
    assert small.crossing == pytest.approx(nbytes * predictor.rates["border"].ms)
    assert small.break_even == pytest.approx(small.crossing / (largest.decode.ms - small.decode.ms))
    assert (largest.crossing, largest.break_even) == (0, None)
