"""Plans that share blocks are what each of them is on its own, in whatever order they are made."""

from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest
from tests.conftest import InMemoryCheckpoint, build_model

from cetane.hardware import notch
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, parse_recipe

CHECKPOINT = InMemoryCheckpoint(build_model("llama"))
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "split, fp16": {"lowering": {"split_contracting": True}},
    "split, int8": {
        "lowering": {"split_contracting": True},
        "compression": {"default": "int8-per-channel"},
    },
    "lookup": {"embedding": {"inside": True}},
}


@pytest.fixture(autouse=True)
def small_notch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gate, up and down of the tiny model are on the notch in fp16, and not in int8."""
    monkeypatch.setattr(notch, "NOTCH", 768)
    monkeypatch.setattr(notch, "MARGIN", 0)
    yield


def recipe(name: str) -> Recipe:
    content = {"name": "test", "cache": {"context": 128}, "layout": {"kind": "per-layer"}}
    return parse_recipe(content | RECIPES[name], name)


def weights(planner: Planner) -> list[tuple[str, tuple[int, ...]]]:
    """Paths and shapes of everything that a plan stores."""
    return [
        (f"{block.name}.{path}", weight.shape)
        for blocks in planner.members.values()
        for block in blocks
        for path, weight in block.weights()
    ]


@pytest.mark.parametrize("names", permutations(RECIPES, 3), ids=", ".join)
def test_a_sweep_does_not_depend_on_its_order(names: tuple[str, ...]) -> None:
    alone = {name: weights(Planner(CHECKPOINT, recipe(name))) for name in names}
    planners: list[Planner] = []
    for name in names:
        planners.append(Planner(CHECKPOINT, recipe(name), planners[-1] if planners else None))
    assert {n: weights(p) for n, p in zip(names, planners, strict=True)} == alone
    assert [p.plan() for p in planners] == [Planner(CHECKPOINT, p.recipe).plan() for p in planners]


def test_the_recipes_have_other_weights() -> None:
    """Else the test above could not fail."""
    made = [tuple(weights(Planner(CHECKPOINT, recipe(name)))) for name in RECIPES]
    assert len(set(made)) == 3  # in int8 nothing is split


def test_plans_of_one_structure_share_their_blocks() -> None:
    """Sweeps are quick because of that."""
    one = Planner(CHECKPOINT, recipe("split, int8"))
    other = recipe("split, int8").model_copy(update={"name": "other"})
    assert Planner(CHECKPOINT, other, one).model.layers[0] is one.model.layers[0]
    plain = Planner(CHECKPOINT, recipe("plain"))
    assert Planner(CHECKPOINT, recipe("lookup"), plain).model.layers[1] is plain.model.layers[0]
