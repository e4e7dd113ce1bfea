"""A model that nobody knows is met with the nearest family, and what it would not read."""

from pathlib import Path
from typing import Any

import pytest
from tests.conftest import InMemoryCheckpoint, build_model

from cetane.errors import CetaneError
from cetane.families import ADDING, author
from cetane.planner import Planner
from cetane.planner.nearest import Nearest, nearest_family
from cetane.schema.recipe import parse_recipe


def near(kind: str) -> Nearest:
    checkpoint = InMemoryCheckpoint(build_model(kind))
    told = nearest_family(checkpoint)
    assert told is not None
    return told


def test_a_model_with_other_experts() -> None:
    """cohere2_moe: a Cohere with experts in place of an MLP."""
    told = near("cohere2_moe")
    assert told.model_type == "cohere"
    assert "model.layers.*.mlp.experts.gate_up_proj" in told.unread
    assert "model.layers.*.mlp.up_proj.weight" in told.missing
    assert "num_experts" in told.keys
    assert "vocab_size" not in told.keys


def test_a_model_with_another_attention() -> None:
    """diffllama: a Llama whose attention takes two maps from each other."""
    told = near("diffllama")
    assert (told.model_type, told.missing) == ("llama", ())
    assert told.reads == told.tensors - 8
    assert "model.layers.*.self_attn.lambda_k1" in told.unread
    assert "num_hidden_layers" not in told.keys


def test_a_config_that_no_family_can_have(caplog: pytest.LogCaptureFixture) -> None:
    """Falcon-H1's config refuses the `layer_types` of others, and transformers logged it whole."""
    near("afmoe")
    assert not caplog.text


def test_a_model_with_other_names() -> None:
    """rwkv: no tensor has a name that a family knows, so none is near."""
    assert nearest_family(InMemoryCheckpoint(build_model("rwkv"))) is None


def test_what_a_config_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' defaults are 48 layers of 512 experts: they took a minute."""
    checkpoint = InMemoryCheckpoint(build_model("diffllama"))
    whole = nearest_family(checkpoint)
    del checkpoint.config["num_hidden_layers"]
    configs: list[dict[str, Any]] = []

    def watch(config: dict[str, Any], *others: Any) -> Any:
        configs.append(config)
        return author(config, *others)

    monkeypatch.setattr("cetane.planner.nearest.author", watch)
    assert nearest_family(checkpoint) == whole
    assert {config["num_hidden_layers"] for config in configs} == {2}
    assert {config["num_experts"] for config in configs} == {1}


def test_layers_that_the_tensors_cannot_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config of a few bytes makes no family build a thousand layers."""
    checkpoint = InMemoryCheckpoint(build_model("diffllama"))
    checkpoint.config["num_hidden_layers"] = 1000
    monkeypatch.setattr("cetane.planner.nearest.author", None)
    recipe = parse_recipe({"name": "test", "cache": {"context": 128}}, "test")
    for refused in (nearest_family, lambda checkpoint: Planner(checkpoint, recipe)):
        with pytest.raises(CetaneError, match="the config says 1000 layers, but there are only"):
            refused(checkpoint)


def test_the_page_on_adding_is_there() -> None:
    assert "# Add a family" in Path(ADDING).read_text()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("diffllama", "llama, which reads 21 of its 29 tensors"),
        (
            "cohere2_moe",
            "cohere, which reads 12 of its 18 tensors, and misses "
            "model.layers.*.mlp.down_proj.weight and 2 more",
        ),
    ],
)
def test_a_refusal_names_it(kind: str, told: str) -> None:
    recipe = parse_recipe({"name": "test", "cache": {"context": 128}}, "test")
    with pytest.raises(CetaneError) as refused:
        Planner(InMemoryCheckpoint(build_model(kind)), recipe)
    assert refused.value.message.startswith(f"unknown architecture {kind!r}; nearest is ")
    assert refused.value.message.endswith(told)


def test_a_refusal_without_one_names_all() -> None:
    recipe = parse_recipe({"name": "test", "cache": {"context": 128}}, "test")
    with pytest.raises(
        CetaneError, match=r"unknown architecture 'rwkv' .all [0-9]+ that are known: "
    ):
        Planner(InMemoryCheckpoint(build_model("rwkv")), recipe)
