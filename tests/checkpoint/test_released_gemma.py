"""Gemma 3 as it was released: real configs and shapes, without weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cetane.checkpoint import open_checkpoint
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe

COMMON: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "bos_token_id": 2,
    "pad_token_id": 0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 262144,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "270m": COMMON
    | {
        "_sliding_window_pattern": 6,
        "eos_token_id": 1,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "num_hidden_layers": 18,
        "use_bidirectional_attention": False,
    },
    "1b": COMMON
    | {
        "cache_implementation": "hybrid",
        "eos_token_id": [1, 106],
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "sliding_window_pattern": 6,
    },
    "4b": {  # which leaves out what was the class's default
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "boi_token_index": 255999,
        "eos_token_id": [1, 106],
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
    },
}
SIZES = {"270m": 268_098_176, "1b": 999_885_952, "4b": 3_880_263_168}
"""Parameters of the text parts."""


def write(folder: Path, name: str) -> Path:
    """A folder whose tensors are holes in a file."""
    config = CONFIGS[name]
    text = config.get("text_config", config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**(text | {"model_type": "gemma3_text"}))
        )
    prefix = "language_model." if "text_config" in config else ""
    header, end = {}, 0
    for tensor, value in model.state_dict().items():
        if tensor != "lm_head.weight":
            start, end = end, end + 2 * value.numel()
            header[prefix + tensor] = {
                "dtype": "BF16", "shape": list(value.shape), "data_offsets": [start, end],
            }  # fmt: skip
    assert end == 2 * SIZES[name]
    text_header = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text_header).to_bytes(8, "little") + text_header)
        file.truncate(8 + len(text_header) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_plan(tmp_path: Path, name: str) -> None:
    recipe = override(load_recipe("gemma3"), {"family.residual_scale": 1 / 32})
    planner = Planner(open_checkpoint(write(tmp_path, name)), recipe)
    plan, model = planner.plan(), planner.model
    layers = len(model.layers)
    kinds = [block.keeps[0] for block in model.layers]
    assert kinds == ["full" if i % 6 == 5 else "sliding" for i in range(layers)]
    window = 1024 if name == "4b" else 512
    assert plan.caches["sliding"].count == window
    assert plan.caches["full"].count == 2048
    group = model.memory["full"]
    heads = (8, 4) if name == "4b" else (4, 1)
    assert (group.query, group.heads, group.dim, group.window) == (*heads, 256, None)  # type: ignore[union-attr]
    width = {"270m": 640, "1b": 1152, "4b": 2560}[name]
    assert model.embedding.factor == pytest.approx(width**0.5 / 32)
    sliding, full = (model.rotary[kind].inverse_frequencies for kind in ("sliding", "full"))
    assert float(sliding[1]) == pytest.approx(1e4 ** (-2 / 256))
    assert float(full[1]) == pytest.approx(1e6 ** (-2 / 256) / (8 if name == "4b" else 1))
    assert plan.vocab == (262208 if name == "4b" else 262144)
    norms = sum(w.elements for b in model.layers for _, w in b.weights() if w.kind is None)
    linear = SIZES[name] - plan.vocab * width - norms - width
    stored = sum(s.weight_bytes for s in plan.shards)
    assert stored == pytest.approx(linear + plan.vocab * width, rel=0.01)
