"""Models with LayerNorms equal transformers at every position, in every contract."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint
from tests.families.config_parts import ROPES
from tests.families.layer_normed_models import HALF, IN_PART, LAYER_NORMED, build_layer_normed
from tests.families.parity import FEEDS, assert_parity, cuts, in_turn
from tests.families.recipes import recipe, recipes

from cetane.errors import CetaneError
from cetane.families import author, rotated
from cetane.families.layer_normed import HEADED
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

FUSED = ("falcon", *HEADED)
"""The model types that store queries, keys and values as one tensor."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {}),
    "cohere, biases, norms of its own in each head": (
        "cohere",
        {"use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False},
    ),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 6}),
    "cohere2, biases, nothing slides": (
        "cohere2",
        {"attention_bias": True, "layer_types": ["full_attention"] * 2, "logit_scale": 0.25},
    ),
    "falcon": ("falcon", {}),
    "falcon, two norms, shared keys, biases": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 40},
    ),
    "falcon, one norm, own keys, untied": (
        "falcon",
        {
            "new_decoder_architecture": True,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
            "rope_parameters": ROPES["linear"],
        },
    ),
    "falcon, one behind the other": (
        "falcon",
        {"parallel_attn": False, "multi_query": False, "bias": True},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox, tied, one behind the other, no biases of attention": (
        "gpt_neox",
        {
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": ROPES["linear"] | {"partial_rotary_factor": 0.25},
        },
    ),
    "jais2": ("jais2", {}),
    "jais2, no biases, tied": (
        "jais2",
        {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
    ),
    "nemotron": ("nemotron", {}),
    "nemotron, biases, tied, heads turned whole": (
        "nemotron",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": ROPES["llama3"] | {"partial_rotary_factor": 1.0},
        },
    ),
    "olmo": ("olmo", {}),
    "olmo, biases, bounds, tied": (
        "olmo",
        {"attention_bias": True, "clip_qkv": 0.3, "tie_word_embeddings": True},
    ),
    "persimmon": ("persimmon", {}),
    "persimmon, tied, plain heads": (
        "persimmon",
        {"qk_layernorm": False, "tie_word_embeddings": True, "num_hidden_layers": 3},
    ),
    "phi": ("phi", {"num_key_value_heads": 4}),
    "phi, tied, normed heads": ("phi", {"qk_layernorm": True, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {}),
    "stablelm, biases, parallel, normed heads": (
        "stablelm",
        {
            "use_qkv_bias": True,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": ("starcoder2", {"rope_parameters": ROPES["yarn"]}),
    "starcoder2, windowed, untied, no biases": (
        "starcoder2",
        {"use_bias": False, "sliding_window": 6, "tie_word_embeddings": False},
    ),
}


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    kind, config = MODELS[name]
    assert_parity(build_layer_normed(kind, **config), recipe(contract, "chunks", slices=3), FEEDS)


@pytest.mark.parametrize("name", ["cohere", "phi, tied, normed heads", "stablelm"])
def test_a_smaller_residual_stream_is_the_same_model(name: str) -> None:
    kind, config = MODELS[name]
    scaled = recipe("readonly", "chunks", family={"residual_scale": 2**-5})
    assert_parity(build_layer_normed(kind, **config), scaled, {"uneven": FEEDS["uneven"]})


def test_a_head_for_some_tokens_has_their_biases() -> None:
    checkpoint = InMemoryCheckpoint(build_layer_normed("phi"))
    (head,) = Planner(checkpoint, recipe("readonly", "chunks")).model.heads(1, (3, 7, 50))
    head.load(checkpoint)
    assert head.lm_head.bias.tolist() == checkpoint.read("lm_head.bias")[[3, 7, 50]].tolist()


@pytest.mark.parametrize("kind", [kind for kind in LAYER_NORMED if kind not in FUSED])
def test_only_values_turn(kind: str) -> None:
    """A LayerNorm subtracts a mean, which no rotation keeps."""
    checkpoint = InMemoryCheckpoint(build_layer_normed(kind))
    turned = rotated(checkpoint, Planner(checkpoint, recipe("readonly", "chunks")).model)
    assert turned.stream is None
    ends = "v_proj.weight", "v_proj.bias", "o_proj.weight", "dense.weight"
    assert all(name.endswith(ends) for name in turned.folds)


@pytest.mark.parametrize("kind", FUSED)
def test_nothing_turns_beside_queries(kind: str) -> None:
    """One tensor holds queries, keys and values."""
    checkpoint = InMemoryCheckpoint(build_layer_normed(kind))
    model = Planner(checkpoint, recipe("readonly", "chunks")).model
    with pytest.raises(CetaneError, match="nothing of a"):
        rotated(checkpoint, model)


MANY = {"new_decoder_architecture": True}
"""A Falcon whose heads may share keys in groups."""


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("cohere", {"logit_scale": None}, "logit_scale = None"),
        ("cohere2", {"sliding_window": None}, "sliding_window = None"),
        ("nemotron", {"num_key_value_heads": None}, "num_key_value_heads"),
        ("nemotron", {"hidden_act": "xielu"}, "hidden_act = 'xielu'"),
        ("phi", {"head_dim": 8, "qk_layernorm": True}, "4 heads of 8 channels"),
        ("stablelm", {"head_dim": 8}, "4 heads of 8 channels"),
        ("falcon", {"alibi": True}, "alibi = True, positions by biases on scores, which is not"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads = 2, not 4"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "but an older architecture"),
        ("falcon", MANY | {"num_kv_heads": 3}, "not a multiple of num_kv_heads = 3"),
        ("falcon", MANY | {"parallel_attn": False}, "without parallel norms"),
        ("falcon", {"num_attention_heads": 6}, "6 heads of 10 channels are not hidden_size = 64"),
        ("gpt_neox", {"head_dim": 8}, "4 heads of 8 channels"),
        ("persimmon", {"head_dim": 8}, "4 heads of 8 channels"),
        ("stablelm", {"layer_norm_eps": 0.0}, "layer_norm_eps = 0"),
        ("stablelm", {"rope_parameters": HALF | {"partial_rotary_factor": 0.2}}, "of 16 channels"),
    ],
)
def test_wrong_configs(kind: str, config: dict[str, Any], said: str) -> None:
    made = build_layer_normed(kind).config.to_dict() | config
    with pytest.raises(CetaneError, match=said):
        author(made, "c1t", {}, {})


BOOLEANS = {
    "cohere": ("attention_bias", "use_qk_norm"),
    "cohere2": ("attention_bias",),
    "falcon": ("bias", "multi_query", "parallel_attn"),
    "gpt_neox": ("attention_bias", "use_parallel_residual"),
    "jais2": ("attention_bias", "mlp_bias"),
    "nemotron": ("attention_bias", "mlp_bias"),
    "olmo": ("attention_bias",),
    "persimmon": ("qk_layernorm",),
    "phi": ("qk_layernorm",),
    "stablelm": ("qk_layernorm", "use_parallel_residual", "use_qkv_bias"),
    "starcoder2": ("use_bias",),
}
"""The keys of each model type that are true or false."""


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model type and a small config of it."""
    kind = draw(st.sampled_from(LAYER_NORMED))
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    layers, dim = draw(st.integers(1, 3)), draw(st.sampled_from([4, 8, 12, 16]))
    part = {"partial_rotary_factor": draw(st.sampled_from([0.5, 1.0]))} if kind in IN_PART else {}
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "hidden_size": kv * ratio * dim,
        "intermediate_size": draw(st.integers(1, 80)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu2"])),
        "rope_parameters": ROPES["default"] | part,
    }
    config |= {key: draw(st.booleans()) for key in BOOLEANS[kind]}
    if kind == "falcon":
        config["ffn_hidden_size"], config["activation"] = map(
            config.pop, ("intermediate_size", "hidden_act")
        )
        del config["head_dim"]
        if draw(st.booleans()):
            norms = draw(st.sampled_from([None, 1, 2]))
            config |= MANY | {"num_kv_heads": kv, "num_ln_in_parallel_attn": norms}
            config["parallel_attn"] = True
    if kind in ("cohere", "cohere2"):
        config["logit_scale"] = draw(st.sampled_from([1.0, 2.0]))
    if kind == "olmo":
        config["clip_qkv"] = draw(st.none() | st.floats(0.05, 2))
    if kind == "starcoder2":
        config["sliding_window"] = draw(st.none() | st.integers(1, 40))
    if kind == "cohere2":
        config["sliding_window"] = draw(st.integers(1, 40))
        types = st.sampled_from(["sliding_attention", "full_attention"])
        config["layer_types"] = draw(st.lists(types, min_size=layers, max_size=layers))
    return kind, config


@settings(max_examples=60, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: tuple[str, dict[str, Any]], made: Recipe, pieces: list[int]) -> None:
    assert_parity(build_layer_normed(config[0], **config[1]), made, {"pieces": pieces})
