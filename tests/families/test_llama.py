"""The bar of the project: an authored model equals transformers in fp32, at every position.

Every model is run with every cache contract, in one-token steps, in steps of 4, by prefill, and in
uneven pieces; sequences fill the context, pass the windows and the prefill length.
"""

from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.config_parts import LONGROPE, MINISTRAL, MULTIPLIERS, ROPES, STRETCHED
from tests.families.parity import (
    FEEDS,
    assert_close,
    assert_parity,
    cuts,
    engine_of,
    in_turn,
    truth,
)
from tests.families.recipes import recipe, recipes

from cetane.planner import Planner
from cetane.schema.recipe import Recipe
from cetane.schema.slots import CONTRACTS

UNUSED = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
          "original_max_position_embeddings": 16}  # fmt: skip
"""A factor on queries after 16 tokens, in the config of a model that has none."""
WORLD = {"sliding_window": 6, "bos_token_id": 0}
"""Code World Model's config knows no model without a first token."""
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "1 to 1": ("llama", {"num_key_value_heads": 4}),
    "3 to 1": ("llama", {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "4 to 1": ("llama", {"num_key_value_heads": 1}),
    "8 to 1": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}),
    "attention bias": ("llama", {"attention_bias": True}),
    "mlp bias": ("llama", {"mlp_bias": True, "attention_bias": True}),
    "linear": ("llama", {"rope_parameters": ROPES["linear"]}),
    "llama3": ("llama", {"rope_parameters": ROPES["llama3"]}),
    "yarn": ("llama", {"rope_parameters": ROPES["yarn"]}),
    "dynamic": ("llama", {"rope_parameters": ROPES["linear"] | {"rope_type": "dynamic"}}),
    **{f"head of {d}": ("llama", {"head_dim": d}) for d in (6, 10, 12, 20, 24)},
    "head unsaid": ("llama", {"head_dim": None}),
    **{a: ("llama", {"hidden_act": a}) for a in ("gelu", "gelu_pytorch_tanh", "gelu_new", "relu")},
    "eps": ("llama", {"rms_norm_eps": 0.1}),
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "five layers": ("llama", {"num_hidden_layers": 5}),
    "odd sizes": ("llama", {"vocab_size": 101, "intermediate_size": 37, "hidden_size": 36}),
    "a window that llama ignores": ("llama", {"sliding_window": 5}),
    "unturned layers that llama ignores": ("llama", {"no_rope_layers": [1, 0]}),
    "mistral": ("mistral", {"sliding_window": None}),
    **{f"mistral, window {w}": ("mistral", {"sliding_window": w}) for w in (1, 7, 31, 40)},
    "biases that mistral ignores": ("mistral", {"attention_bias": True, "mlp_bias": True}),
    "ministral": (
        "ministral",
        {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL, "max_position_embeddings": 256}),
    "ministral3, a factor of one": (
        "ministral3",
        {"rope_parameters": UNUSED | {"llama_4_scaling_beta": 0.0}},
    ),
    "a factor that llama ignores": ("llama", {"rope_parameters": UNUSED}),
    "a factor that qwen3 ignores": ("qwen3", {"rope_parameters": UNUSED}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, unused window": ("qwen2", {"sliding_window": 5, "use_sliding_window": False}),
    "qwen2, upper layers windowed": (
        "qwen2",
        {
            "sliding_window": 6,
            "use_sliding_window": True,
            "max_window_layers": 1,
            "num_hidden_layers": 3,
        },
    ),
    "qwen3": ("qwen3", {}),
    "qwen3, bias": ("qwen3", {"attention_bias": True, "head_dim": 24}),
    "qwen3, windowed": (
        "qwen3",
        {
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "smollm3, biases, mostly unturned": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 0, 1],
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3, more turns than layers": ("smollm3", {"no_rope_layers": [1, 0, 1]}),
    "smollm3, unturned layers windowed": (
        "smollm3",
        {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 6},
    ),
    "granite": ("granite", MULTIPLIERS),
    "granite, tied, biases": (
        "granite",
        MULTIPLIERS | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "apertus": ("apertus", {"rope_parameters": ROPES["llama3"]}),
    "apertus, biases, tied, a plain activation": (
        "apertus",
        {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "silu"},
    ),
    "bitnet": ("bitnet", {"hidden_act": "relu2", "tie_word_embeddings": True}),
    "bitnet, biases": ("bitnet", {"attention_bias": True, "rope_parameters": ROPES["llama3"]}),
    "nanochat": ("nanochat", {}),
    "nanochat, biases, tied, no bound": (
        "nanochat",
        {
            "attention_bias": True,
            "tie_word_embeddings": True,
            "final_logit_softcapping": None,
            "rope_parameters": ROPES["llama3"],
        },
    ),
    "arcee": ("arcee", {}),
    "arcee, biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "code world model": ("cwm", WORLD | {"num_hidden_layers": 5}),
    "code world model, biases": (
        "cwm",
        WORLD | {"mlp_bias": True, "layer_types": ["full_attention"] * 2},
    ),
    "ernie": ("ernie4_5", {}),
    "ernie, tied, biases": ("ernie4_5", {"tie_word_embeddings": True, "use_bias": True}),
    "helium": ("helium", {"rms_norm_eps": 1e-8}),
    "helium, biases": ("helium", {"attention_bias": True, "mlp_bias": True}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma, apart, biases": (
        "gemma",
        {"tie_word_embeddings": False, "attention_bias": True, "hidden_act": "silu"},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"tie_word_embeddings": True}),
    "hunyuan, biases, a stretched base": (
        "hunyuan_v1_dense",
        {"attention_bias": True, "rope_parameters": ROPES["linear"] | STRETCHED},
    ),
    "hunyuan, dynamic": (
        "hunyuan_v1_dense",
        {"rope_parameters": ROPES["linear"] | {"rope_type": "dynamic"}},
    ),
    "hyperclovax": ("hyperclovax", MULTIPLIERS),
    "internlm3": ("internlm3", {"attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 12}),
    "exaone": ("exaone", {"rope_parameters": ROPES["llama3"], "tie_word_embeddings": True}),
    "hyperclovax, biases, no norms behind": (
        "hyperclovax",
        MULTIPLIERS | {"use_post_norm": False, "attention_bias": True, "mlp_bias": True},
    ),
    "seed": ("seed_oss", {"rope_parameters": ROPES["yarn"]}),
    "seed, other biases": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "phi3": ("phi3", {}),
    "phi3, windowed": ("phi3", {"sliding_window": 7, "num_key_value_heads": 1}),
    "phi3, heads turned in part": (
        "phi3",
        {
            "tie_word_embeddings": True,
            "rope_parameters": ROPES["default"] | {"partial_rotary_factor": 0.5},
        },
    ),
    "phi3, longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "max_position_embeddings": 256,
         "original_max_position_embeddings": 64},
    ),
}  # fmt: skip


@cache
def model_of(name: str) -> Any:
    """One of `MODELS`, made once."""
    kind, config = MODELS[name]
    return build_model(kind, **config)


@cache
def truth_of(name: str) -> Any:
    """Its logits, by transformers."""
    return truth(model_of(name))


@pytest.mark.parametrize(("name", "contract"), in_turn(MODELS))
def test_models(name: str, contract: str) -> None:
    engine = engine_of(model_of(name), recipe(contract, "chunks", slices=3))
    assert_close(engine, truth_of(name), FEEDS)


@pytest.mark.parametrize("name", MODELS)
def test_a_smaller_residual_stream_is_the_same_model(name: str) -> None:
    scaled = recipe("readonly", "chunks", family={"residual_scale": 2**-5})
    engine = engine_of(model_of(name), scaled)
    assert_close(engine, truth_of(name), {"uneven": FEEDS["uneven"]})


@cache
def windowed() -> Any:
    return build_model("mistral", sliding_window=7, num_hidden_layers=5)


@pytest.mark.parametrize(
    ("contract", "kind", "order", "slices"),
    [
        (contract, kind, ("c1t", "ct1")[number % 2], slices)
        for number, (contract, kind, slices) in enumerate(
            product(CONTRACTS, ("single", "chunks", "per-block"), (1, 3, 5))
        )
    ],
)
def test_recipes(contract: str, kind: str, order: str, slices: int) -> None:
    feeds = {name: FEEDS[name] for name in ("prefill", "uneven")}
    assert_parity(windowed(), recipe(contract, kind, order, slices), feeds)


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize(
    ("verify", "prefill", "shapes"),
    [(None, None, "static"), (None, 32, "static"), (3, None, "static"), (4, 8, "range")],
)
def test_functions(contract: str, verify: int | None, prefill: int | None, shapes: str) -> None:
    """Some functions left out, a prefill as wide as the context, and one function for all."""
    made = recipe(contract, "chunks", verify=verify, prefill=prefill, shapes=shapes)
    assert_parity(windowed(), made, FEEDS)


BIASES = {
    "attention_bias": (
        "arcee", "bitnet", "exaone", "gemma", "granite", "helium", "hunyuan_v1_dense",
        "hyperclovax", "iquestcoder", "llama", "qwen3", "seed_oss", "smollm3",
    ),
    "attention_out_bias": ("seed_oss",),
    "mlp_bias": (
        "arcee", "cwm", "exaone", "granite", "helium", "hyperclovax", "iquestcoder", "llama",
        "seed_oss", "smollm3",
    ),
    "use_bias": ("ernie4_5",),
}  # fmt: skip
"""The model types that read each of these keys."""
DRAWN = (
    "apertus", "arcee", "bitnet", "cwm", "ernie4_5", "exaone", "gemma", "granite", "helium",
    "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "llama", "mistral", "nanochat",
    "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
)  # fmt: skip
"""Ministrals are left out: their configs are full of conditions."""


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model type and a small config of it; all sizes, ratios and options at once."""
    kind = draw(st.sampled_from(DRAWN))
    kv, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    layers = draw(st.integers(1, 3))
    rope = draw(st.sampled_from(list(ROPES.values())))
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": kv * ratio,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from([2, 6, 8, 10, 12, 16, 20, 24])),
        "hidden_size": kv * ratio * draw(st.sampled_from([8, 10, 12])),
        "intermediate_size": draw(st.integers(1, 80)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "relu"])),
        "rope_parameters": rope | {"rope_theta": draw(st.sampled_from([100.0, 1e4, 1e6]))},
    }
    if kind in ("mistral", "phi3", "qwen2", "qwen3", "smollm3"):
        config["sliding_window"] = draw(st.none() | st.integers(1, 40))
    if kind in ("qwen2", "qwen3", "smollm3"):
        config["use_sliding_window"] = config["sliding_window"] is not None
    if kind in ("qwen2", "qwen3"):
        config["max_window_layers"] = draw(st.integers(0, layers))
    if kind == "cwm":
        types = st.sampled_from(["sliding_attention", "full_attention"])
        config["layer_types"] = draw(st.lists(types, min_size=layers, max_size=layers))
        config |= WORLD | {"sliding_window": draw(st.integers(1, 40))}
    for key in BIASES:
        if kind in BIASES[key]:
            config[key] = draw(st.booleans())
    if kind == "smollm3":
        config["no_rope_layer_interval"] = draw(st.integers(1, 3))
    if kind in ("granite", "hyperclovax"):
        config |= {name: draw(st.floats(0.1, 4)) for name in MULTIPLIERS}
    if kind == "hyperclovax":
        config["use_post_norm"] = draw(st.booleans())
    if kind == "hunyuan_v1_dense" and config["head_dim"] > 2 and draw(st.booleans()):
        config["rope_parameters"] = rope | STRETCHED | {"alpha": draw(st.floats(1, 1e4))}
    if kind == "internlm3":  # transformers takes one answer for both
        config["attention_bias"] = config["mlp_bias"] = draw(st.booleans())
    if kind in ("bitnet", "helium", "hyperclovax"):  # transformers wants it
        config["hidden_size"] = config["head_dim"] * config["num_attention_heads"]
    if kind == "apertus":
        config["hidden_act"] = draw(st.sampled_from(["silu", "xielu"]))
    if kind == "nanochat":
        config["final_logit_softcapping"] = draw(st.none() | st.floats(1, 20))
    if kind == "phi3":  # transformers reads it from the hidden size
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        part = draw(st.sampled_from([0.5, 1.0])) if config["head_dim"] % 4 == 0 else 1.0
        config["rope_parameters"] = ROPES["default"] | {"partial_rotary_factor": part}
    return kind, config


@settings(max_examples=60, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: tuple[str, dict[str, Any]], recipe: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model(config[0], **config[1]), recipe, {"pieces": pieces})


def test_longrope_holds_for_the_context_of_its_training() -> None:
    kind, config = MODELS["phi3, longrope"]
    planner = Planner(InMemoryCheckpoint(build_model(kind, **config)), recipe(kind="single"))
    assert planner.model.max_context == 64


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn"])
def test_configs_as_they_were_written_before_rope_parameters(name: str) -> None:
    rope = dict(ROPES[name])
    model = build_model("llama", rope_parameters=rope)
    config = model.config.to_dict()
    del config["rope_parameters"]
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert_parity(model, recipe(kind="single"), {"prefill": FEEDS["prefill"]}, config)


@pytest.mark.parametrize(
    ("kind", "option", "off"),
    [
        ("mistral", {"sliding_window": 7}, {"sliding_window": None}),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1},
            {"use_sliding_window": False, "sliding_window": None, "layer_types": None},
        ),
        ("llama", {"rope_parameters": ROPES["yarn"]}, {"rope_parameters": ROPES["default"]}),
    ],
)
def test_parity_sees_an_option_that_is_not_ported(
    kind: str, option: dict[str, Any], off: dict[str, Any]
) -> None:
    model = build_model(kind, **option)
    wrong = model.config.to_dict() | off
    with pytest.raises(AssertionError, match="prefill"):
        assert_parity(model, recipe(kind="single"), {"prefill": FEEDS["prefill"]}, wrong)
