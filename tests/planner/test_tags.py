"""What a manifest says of attention, in the published ports' words."""

import pytest
from tests.conftest import InMemoryCheckpoint, build_model

from cetane.checkpoint import open_checkpoint
from cetane.lab.models import zaya_tiny
from cetane.planner import Planner, tags
from cetane.schema.recipe import load_recipe, parse_recipe


@pytest.mark.parametrize(
    ("recipe", "attention", "cca"),
    [
        # The published manifest of experiment 31 has this tag, with "v_o" for "vo".
        ("zaya-exp31-stateful",
         "cca_gqa_stateful_kvcache_rope_partial_qk_fp16_vo_int8_cond_skip", "current-tap"),
        ("zaya-exp35-stateful",
         "cca_gqa_stateful_kvcache_rope_partial_qk_fp16_vo_int8_cond_skip", "current-tap"),
        ("zaya-exp30", "gqa_blend_kvcache_rope_partial_qkvo_int8", "none"),
        ("zaya-exp29-probe", "q_to_o_qo_int8", "none"),
        ("zaya-int4", "cca_gqa_readonly_kvcache_rope_partial_qkvo_int8", "whole"),
    ],
)  # fmt: skip
def test_a_zaya(recipe: str, attention: str, cca: str) -> None:
    planner = Planner(open_checkpoint(zaya_tiny()), load_recipe(recipe))
    assert tags(planner) == {"attn_implementation": attention, "cca": cca}


@pytest.mark.parametrize(
    ("hidden", "form", "said"),
    [(64, "fp16", "qkvo_fp16"), (64, "auto", "qkvo_palette6"), (48, "auto", "qkv_palette6_o_int8")],
)
def test_a_llama(hidden: int, form: str, said: str) -> None:
    recipe = parse_recipe(
        {"name": "x", "cache": {"context": 64}, "compression": {"default": form}}, "x"
    )
    planner = Planner(InMemoryCheckpoint(build_model(hidden_size=hidden)), recipe)
    assert tags(planner) == {"attn_implementation": f"gqa_readonly_kvcache_rope_{said}"}
