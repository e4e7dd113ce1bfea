"""The sentence names the true cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.converting import converted_once

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates.explain import Explanation, explain
from cetane.gates.golden import golden
from cetane.pipeline.build import build

from .conftest import zaya_recipe


def told(bundle: Bundle, checkpoint: Checkpoint) -> Explanation | None:
    return explain(bundle, checkpoint, golden(bundle, checkpoint, lambda *_: None, prompts=0))


def test_a_right_port_needs_no_sentence(good: Bundle, checkpoint: Checkpoint) -> None:
    assert told(good, checkpoint) is None


def test_wrong_weights(bad: Bundle, checkpoint: Checkpoint) -> None:
    found = told(bad, checkpoint)
    assert found is not None
    assert found.cause == "weights"
    assert "model.layers.1.mlp.down_proj.weight" in found.sentence


@pytest.mark.parametrize(
    "departures",
    [["no-qk-norm"], ["undelayed-value"], ["soft-routing"], ["no-router-state"], ["no-means"],
     ["residual-order"], ["bias-on-logits"]],
    ids=lambda names: names[0],
)  # fmt: skip
def test_a_departure_is_authoring(
    departures: list[str], zaya_bundle: Callable[..., Bundle], zaya_checkpoint: Checkpoint
) -> None:
    """And the change of the recipe that mends it is to leave it out."""
    found = told(zaya_bundle(family={"departures": departures}), zaya_checkpoint)
    assert found is not None
    assert found.cause == "authoring"
    assert found.recipe_change == "[family]\ndepartures = []"


@pytest.mark.parametrize("form", ["palette1-kmeans-per-tensor", "palette2-uniform-per-tensor"])
def test_too_few_bits(
    form: str, tiny_checkpoint_folder: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    layout: dict[str, Any] = {"kind": "chunks", "chunks": 1}
    recipe = zaya_recipe(layout=layout, compression={"default": form})
    with converted_once():
        bundle = build(open_checkpoint(tiny_checkpoint_folder), recipe, tmp_path / "b",
                       lambda *_: None)  # fmt: skip
    found = told(bundle, checkpoint)
    assert found is not None
    assert found.cause == "compression"
    assert found.recipe_change == '[compression]\ndefault = "palette6-kmeans-group32"'
