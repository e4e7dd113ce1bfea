"""BLOOM and MPT equal transformers at every position: biases by distance, in every contract."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.alibi_models import build_alibi
from tests.families.parity import FEEDS, assert_parity, cuts, engine_of
from tests.families.recipes import int8_recipe, recipe
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from cetane.errors import CetaneError
from cetane.families.alibi import MODEL_TYPES, bloom_slopes, mpt_slopes
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import FARTHEST, LayerKind
from cetane.families.rotary import RotaryTable
from cetane.planner import Planner
from cetane.schema.interface import MASKED

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize("contract", ["readonly", "blend", "shift", "stateful"])
@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_models(kind: str, contract: str) -> None:
    made = recipe(contract, "chunks", slices=3)
    assert_parity(build_alibi(kind), made, FEEDS, drafts=True)


@pytest.mark.parametrize("heads", range(1, 18))
def test_slopes(heads: int) -> None:
    own = _get_alibi_slopes(heads, torch.device("cpu")).numpy()
    np.testing.assert_allclose(bloom_slopes(heads), own, rtol=1e-5)
    own = -build_mpt_alibi_tensor(heads, 2)[:, 0, 0].numpy()
    np.testing.assert_allclose(mpt_slopes(heads), own, rtol=1e-6)


@pytest.mark.parametrize("slope", [2.0**-16, 2.0**-8, 0.875])
def test_any_slope_hides_within_fp16(slope: float) -> None:
    heads = AttentionHeads(1, 1, 4, 1.0)
    kind = LayerKind(heads, RotaryTable(torch.empty(0)), positioned=False, slopes=(slope,))
    mask = torch.tensor([MASKED, -FARTHEST, -3.0, 0.0]).reshape(1, 1, 1, 4)
    hidden, *seen = kind.biases({"mask": mask}).flatten().tolist()
    assert -65504 < hidden < -2e4
    assert seen == [-FARTHEST * slope, -3 * slope, 0]


@pytest.mark.parametrize(
    ("config", "order"),
    [
        ({"num_attention_heads": 5, "hidden_size": 30, "layer_norm_epsilon": 0.1}, "c1t"),
        ({"attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.5}}, "ct1"),
        ({"attn_config": {"clip_qkv": 0.0}, "tie_word_embeddings": False}, "c1t"),
    ],
)
def test_mpts(config: dict[str, Any], order: str) -> None:
    assert_parity(build_alibi("mpt", **config), recipe(order=order), UNEVEN)


@pytest.mark.parametrize(("kind", "order"), [("bloom", "c1t"), ("mpt", "ct1")])
def test_a_scaled_residual_stream_is_the_same_model(kind: str, order: str) -> None:
    scaled = recipe("blend", order=order, family={"residual_scale": 2**-5})
    assert_parity(build_alibi(kind), scaled, UNEVEN)


def test_caches_of_8_bits_keep_distances() -> None:
    engine = engine_of(build_alibi("bloom"), int8_recipe())
    rows = [engine.session().feed([1, 2, 3, 4, 5], "all")]
    session = engine.session()
    rows.append(np.concatenate([session.feed([token], "all") for token in (1, 2, 3, 4, 5)]))
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm = True"),
        ("bloom", {"n_head": 6, "num_key_value_heads": 6}, "= 64 is not a multiple of 6 heads"),
        ("mpt", {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = inv_sqrt_d_model"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config: alibi = False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config: qk_ln = True"),
        ("mpt", {"attn_config": {"clip_qkv": -1.0}}, "clip_qkv = -1, not above 0"),
    ],
)
def test_what_is_refused(kind: str, change: dict[str, Any], problem: str) -> None:
    model = build_alibi(kind)
    with pytest.raises(CetaneError, match=problem):
        engine_of(model, recipe(), model.config.to_dict() | change)


@pytest.mark.parametrize(
    ("kind", "config", "longest", "beyond"),
    [
        ("bloom", {}, 16384, "goes on after 16384 positions, and a port does not"),
        ("mpt", {"max_seq_len": 2048}, 2048, "was trained for 2048 positions"),
        ("mpt", {"max_seq_len": 65536}, 16384, "goes on after 16384 positions"),
    ],
)
def test_where_contexts_end(kind: str, config: dict[str, Any], longest: int, beyond: str) -> None:
    model = Planner(InMemoryCheckpoint(build_alibi(kind, **config)), recipe()).model
    assert model.max_context == longest
    assert beyond in model.ends


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind, heads = draw(st.sampled_from(MODEL_TYPES)), draw(st.integers(1, 17))
    own = {
        "attn_config": {
            "clip_qkv": draw(st.none() | st.sampled_from([0.0, 0.3, 2.0])),
            "softmax_scale": draw(st.none() | st.floats(0.1, 1.0)),
        }
    }
    return kind, (own if kind == "mpt" else {}) | {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "hidden_size": heads * draw(st.integers(2, 8)),
        "layer_norm_epsilon": draw(st.sampled_from([1e-6, 1e-2])),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=10, derandomize=True)
@given(configs(), cuts, st.sampled_from(["readonly", "blend", "shift", "stateful"]))
def test_anything(drawn: tuple[str, dict[str, Any]], pieces: list[int], contract: str) -> None:
    kind, config = drawn
    assert_parity(build_alibi(kind, **config), recipe(contract, "per-layer"), {"pieces": pieces})
