"""GPT-2 and its relatives equal transformers at every position, in every contract."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.parity import FEEDS, assert_parity, cuts
from tests.families.recipes import recipe, recipes

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.families import author, rotated, unread
from cetane.planner import Planner
from cetane.schema.recipe import Recipe
from cetane.schema.slots import CONTRACTS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2, untied, scores of each layer, wide MLP": (
        "gpt2",
        {
            "num_hidden_layers": 3,
            "scale_attn_by_inverse_layer_idx": True,
            "n_inner": 50,
            "tie_word_embeddings": False,
            "activation_function": "relu",
        },
    ),
    "gpt2, plain scores": ("gpt2", {"scale_attn_weights": False, "reorder_and_upcast_attn": True}),
    "gpt_bigcode": ("gpt_bigcode", {}),
    "gpt_bigcode, untied, keys of each query, plain scores": (
        "gpt_bigcode",
        {
            "multi_query": False,
            "scale_attn_weights": False,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
    "gpt_neo": (
        "gpt_neo",
        {"num_hidden_layers": 3, "attention_types": [[["local", "global", "local"], 1]],
         "window_size": 6},
    ),
    "opt": ("opt", {"ffn_dim": 80}),
    "opt, untied, no biases, bare norms": (
        "opt",
        {
            "ffn_dim": 40,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "contract"), product(MODELS, CONTRACTS))
def test_models(name: str, contract: str) -> None:
    kind, config = MODELS[name]
    assert_parity(
        build_model(kind, **config), recipe(contract, "chunks", slices=3), FEEDS, drafts=True
    )


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_smaller_residual_stream_is_the_same_model(name: str) -> None:
    kind, config = MODELS[name]
    scaled = recipe("readonly", "chunks", family={"residual_scale": 2**-5})
    assert_parity(build_model(kind, **config), scaled, {"uneven": FEEDS["uneven"]})


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_positions_are_added_to_any_embedding(kind: str, inside: bool) -> None:
    """The table of tokens may be inside the first package, or be read in 8 bits."""
    made = recipe("readonly", "single")
    embedding = made.embedding.model_copy(update={"inside": inside})
    made = made.model_copy(update={"embedding": embedding})
    assert_parity(build_model(kind, **MODELS[kind][1]), made, {"uneven": FEEDS["uneven"]})


def test_files_without_a_prefix_are_read(tmp_path: Path) -> None:
    """The published GPT-2 is a model without a head, and stores masks beside weights."""
    model = build_model("gpt2")
    model.save_pretrained(tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8) for layer in range(2)}
    save_file(tensors | masks, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    ours = Planner(checkpoint, recipe("readonly", "chunks")).model
    assert unread(checkpoint.names(), ours) == []
    assert checkpoint.config["num_hidden_layers"] == len(ours.layers) == 2
    assert ours.tensors() <= set(checkpoint.names())


@pytest.mark.parametrize("kind", ["gpt_neo", "opt"])
def test_only_values_turn(kind: str) -> None:
    checkpoint = InMemoryCheckpoint(build_model(kind, **MODELS[kind][1]))
    turned = rotated(checkpoint, Planner(checkpoint, recipe("readonly", "chunks")).model)
    assert turned.stream is None


@pytest.mark.parametrize("kind", ["gpt2", "gpt_bigcode"])
def test_nothing_turns(kind: str) -> None:
    checkpoint = InMemoryCheckpoint(build_model(kind))
    model = Planner(checkpoint, recipe("readonly", "chunks")).model
    with pytest.raises(CetaneError, match="nothing of a"):
        rotated(checkpoint, model)


@pytest.mark.parametrize(
    ("kind", "config", "said"),
    [
        ("gpt2", {"n_layer": 2000}, "num_hidden_layers = 2000"),
        ("gpt2", {"n_head": 0}, "num_attention_heads = 0"),
        ("gpt2", {"n_head": 3}, "is not a multiple of"),
        ("gpt2", {"activation_function": "quick_gelu"}, "quick_gelu"),
        ("gpt2", {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon = 0"),
        ("gpt_bigcode", {"n_inner": 0}, "n_inner = 0"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False"),
        ("opt", {"word_embed_proj_dim": 32}, "word_embed_proj_dim = 32"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm = True"),
        ("gpt_neo", {"window_size": 0}, "sliding_window = 0"),
    ],
)
def test_wrong_configs(kind: str, config: dict[str, Any], said: str) -> None:
    made = build_model(kind, **MODELS[kind][1]).config.to_dict() | config
    with pytest.raises(CetaneError, match=said):
        author(made, "c1t", {}, {})


BOOLEANS = {
    "gpt2": ("scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    "gpt_bigcode": ("scale_attn_weights", "multi_query"),
    "gpt_neo": (),
    "opt": ("enable_bias", "layer_norm_elementwise_affine"),
}
"""The keys of each model type that are true or false."""


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A model type and a small config of it."""
    kind = draw(st.sampled_from(list(BOOLEANS)))
    heads, dim, layers = draw(st.integers(1, 4)), draw(st.integers(2, 16)), draw(st.integers(1, 3))
    width = {"gpt_neo": "intermediate_size", "opt": "ffn_dim"}.get(kind, "n_inner")
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": heads * dim,
        width: draw(st.integers(1, 80)),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
        "activation_function": draw(st.sampled_from(["gelu_new", "gelu", "relu"])),
    }
    config |= {key: draw(st.booleans()) for key in BOOLEANS[kind]}
    if kind == "gpt_neo":
        types = st.sampled_from(["global", "local"])
        kinds = draw(st.lists(types, min_size=layers, max_size=layers))
        config |= {"attention_types": [[kinds, 1]], "window_size": draw(st.integers(1, 40))}
    return kind, config


@settings(max_examples=40, derandomize=True)
@given(configs(), recipes, cuts)
def test_anything(config: tuple[str, dict[str, Any]], made: Recipe, pieces: list[int]) -> None:
    assert_parity(build_model(config[0], **config[1]), made, {"pieces": pieces})
