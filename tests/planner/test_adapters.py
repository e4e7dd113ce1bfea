"""Plans of adapters beside a base: their functions, bytes and calls."""

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cetane.checkpoint import open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.planner import Planner, as_recipe_asks, can_rotate
from cetane.schema.function import Step
from cetane.schema.plan import Plan
from cetane.validation import validated


@pytest.fixture(scope="module")
def plan(adapted: Any, recipe: Any) -> Plan:
    checkpoint = open_checkpoint(adapted.base, adapters=adapted.folders)
    return Planner(checkpoint, recipe(layout={"kind": "per-layer"})).plan()


def test_only_changed_shards_have_functions(plan: Plan) -> None:
    names = {shard.name: {f.name for f in shard.functions} for shard in plan.shards}
    modes = {"decode", "verify", "prefill"}
    plain, dora = ({f"{mode}-{name}" for mode in modes} for name in ("plain", "dora"))
    assert names == {
        "layer-00": modes | plain | dora,
        "layer-01": modes | plain,
        "head-0": modes,
    }


def test_calls_take_them_where_they_are(plan: Plan) -> None:
    called = {
        name: [step.function for step in adapter.modes["decode"].steps if isinstance(step, Step)]
        for name, adapter in plan.adapters.items()
    }
    assert called["plain"] == ["decode-plain", "decode-plain", "decode"]
    assert called["dora"] == ["decode-dora", "decode", "decode"]
    assert [step.function for step in plan.modes["decode"].steps] == ["decode"] * 3


def test_bytes_are_those_of_the_adapters_tensors(plan: Plan, adapted: Any) -> None:
    for name, folder in adapted.folders.items():
        stored = load_file(folder / "adapter_model.safetensors").values()
        assert plan.adapters[name].weight_bytes == 2 * sum(tensor.numel() for tensor in stored)
    alone = Planner(open_checkpoint(adapted.base), plan.recipe).plan()
    assert plan.weight_bytes == alone.weight_bytes
    assert "adapter" not in alone.model_dump_json()  # a manifest without adapters is as it was


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("modes", "decode", "steps", 0, "function"), "decode-dora", "includes the adapter dora"),
        (("adapters", "plain", "modes", "decode", "steps", 0, "function"), "decode-dora",
         "includes the adapter dora"),
        (("adapters", "plain", "modes", "decode", "steps", 0, "function"), "none", "no such"),
        (("adapters", "plain", "modes", "prefill", "tokens"), 4, "other modes than the base"),
        (("shards", 0, "functions", 0, "adapter"), "../x", "should match pattern"),
    ],
)  # fmt: skip
def test_hostile_plans(plan: Plan, path: tuple[Any, ...], value: Any, reason: str) -> None:
    content = plan.model_dump(mode="json")
    assert validated(Plan, content, "plan") == plan
    *parents, last = path
    place = content
    for part in parents:
        place = place[part]
    place[last] = value
    with pytest.raises(CetaneError, match=reason):
        validated(Plan, content, "plan")


def test_turned_channels_take_a_merged_adapter_only(adapted: Any, recipe: Any) -> None:
    turning = recipe(compression={"rotate": True})
    beside = open_checkpoint(adapted.base, adapters=adapted.folders)
    assert not can_rotate(beside, turning)
    with pytest.raises(CetaneError, match="cannot be turned"):
        as_recipe_asks(beside, turning)
    merged = open_checkpoint(adapted.base, adapted.folders["dora"])
    made = as_recipe_asks(merged, turning)
    assert made.merged == merged.merged
    ids = list(range(5, 25))
    with torch.inference_mode():
        wanted = adapted.merged["dora"](torch.tensor([ids])).logits[0].numpy()
    ours = authored_engine(Planner(made, turning), made).session().feed(ids, "all")
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-3)


def test_names_that_python_uses(adapted: Any, recipe: Any) -> None:
    folders = dict.fromkeys(("train", "keys", "weight", "on"), adapted.folders["dora"])
    checkpoint = open_checkpoint(adapted.base, adapters=folders)
    assert Planner(checkpoint, recipe()).plan().adapters.keys() == folders.keys()


def test_a_change_that_no_projection_takes(adapted: Any, recipe: Any, tmp_path: Any) -> None:
    """A norm's bias, say: peft would not write it, a hostile file may."""
    folder = tmp_path / "lora"
    folder.mkdir()
    config = (adapted.folders["plain"] / "adapter_config.json").read_bytes()
    (folder / "adapter_config.json").write_bytes(config)
    tensors = load_file(adapted.folders["plain"] / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens"
    tensors |= {
        f"{name}.lora_A.weight": tensors[next(iter(tensors))].new_zeros(3, 64),
        f"{name}.lora_B.weight": tensors[next(iter(tensors))].new_zeros(288, 3),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    checkpoint = open_checkpoint(adapted.base, adapters={"a": folder})
    with pytest.raises(CetaneError, match="which is no projection here"):
        Planner(checkpoint, recipe())
