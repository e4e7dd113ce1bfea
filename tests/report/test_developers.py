"""What a page tells an app's developer, by hand and by coremltools' reader."""

from math import prod

import coremltools as ct
import pytest
from tests.conftest import TINY, build_model
from tests.families.streaming_models import NINE, SCORES, streaming_engine, streaming_recipe

from cetane.bundle import Bundle
from cetane.report.content.page import BundleReport
from cetane.report.developers import interfaces


@pytest.mark.parametrize("contract", ["readonly", "shift"])
def test_roles_are_those_of_the_contract(contract: str) -> None:
    """Heads that stream see the first tokens too, and new columns go where the cache wants them."""
    sinks = 0 if contract == "shift" else 3
    recipe = streaming_recipe(SCORES, contract, sinks)
    model = build_model("llama", **NINE)
    plan = streaming_engine(model, recipe).plan
    roles = {t.role for one in interfaces(plan) for t in one.tensors}
    masks = [role for role in roles if role.startswith("0 where")]
    near = [role for role in masks if "the last 20 tokens" in role]
    assert near and all(("and the first 3 of the sequence" in role) == bool(sinks) for role in near)
    assert all("else -40000" in role for role in masks)
    assert any("drop as many oldest ones" in role for role in roles) == (contract == "shift")
    assert any("at its token's slot" in role for role in roles) == (contract == "readonly")


def test_memory_by_hand(full: BundleReport, judged: Bundle) -> None:
    rows = {row.name: row.bytes for row in full.developers.memory}
    plan = judged.plan
    context, heads, width = (
        plan.recipe.cache.context, TINY["num_key_value_heads"], TINY["head_dim"],
    )  # fmt: skip
    assert rows["buffers"] == 2 * TINY["num_hidden_layers"] * heads * width * context * 2
    assert rows["largest call"] == max(
        sum(
            prod(feature.type.multiArrayType.shape) * 2
            for feature in (*function.input, *function.output)
            if feature.name not in ("kv_k", "kv_v")
        )
        for shard in plan.shards
        for function in ct.utils.load_spec(str(judged.shard(shard.name))).description.functions
    )
    assert full.developers.total == sum(rows.values())
