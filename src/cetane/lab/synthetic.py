"""Synthetic models: a small random Gemma 4 on disk, and large models as shapes without weights."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from cetane.errors import CetaneError
from cetane.files import PARTIAL, remove

LAYERS = 35
KINDS = ["sliding_attention" if (i + 1) % 5 else "full_attention" for i in range(LAYERS)]
GEMMA4_E2B: dict[str, Any] = {
    "model_type": "gemma4_text", "vocab_size": 262144, "vocab_size_per_layer_input": 262144,
    "hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": LAYERS,
    "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "global_head_dim": 512,
    "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 20, "use_double_wide_mlp": True,
    "sliding_window": 512, "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "max_position_embeddings": 131072, "layer_types": KINDS,
}  # fmt: skip
"""The text part of google/gemma-4-E2B-it's config.json."""
SMALL: dict[str, Any] = GEMMA4_E2B | {
    "vocab_size": 2048, "vocab_size_per_layer_input": 2048, "hidden_size": 64,
    "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "global_head_dim": 32,
    "hidden_size_per_layer_input": 8, "sliding_window": 64, "max_position_embeddings": 4096,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
"""E2B with narrow layers: each keeps its kind and its caches' owner, so the graphs are the same."""
SHAPES: dict[str, dict[str, Any]] = {"gemma4-e2b": GEMMA4_E2B, "zaya1-8b": {"model_type": "zaya"}}
SEED = 4
ADDED = 0.15
"""The root mean square that each part of a layer adds to the residual stream; its last norm sets
it."""


def write_gemma4(folder: Path, tokenizer: Path) -> Path:
    """A checkpoint of `SMALL` with random weights, the same on every machine. An existing one is
    kept.

    Layers' scalars are random too. Queries are short, since scores are not scaled: long ones would
    make every softmax a hard choice. A layer adds little to its input, as in a trained model. With
    more, 35 random layers turn fp16's rounding into another answer. `tokenizer` is the folder of a
    tokenizer with 2048 tokens, which is copied.
    """
    if (folder / "config.json").is_file():
        return folder
    from transformers import AutoConfig, AutoModelForCausalLM

    generator = torch.Generator().manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**SMALL), attn_implementation="eager", dtype=torch.float32
    )
    partial = folder.with_name(folder.name + PARTIAL)
    remove(partial)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            drawn = torch.randn(tensor.shape, generator=generator)
            if name.endswith("layer_scalar"):
                tensor.copy_(0.94 + 0.01 * drawn.clamp(-3, 3))
            elif tensor.ndim == 1:
                tensor.copy_((ADDED if ".post_" in name else 1) * (1 + 0.1 * drawn))
            else:
                tensor.copy_(drawn * tensor.shape[-1] ** -0.5)
        for layer in model.model.layers:
            layer.self_attn.q_norm.weight *= layer.self_attn.head_dim**-0.5
    partial.mkdir(parents=True)
    tensors = {n: t for n, t in model.state_dict().items() if n != "lm_head.weight"}  # tied
    save_file(tensors, partial / "model.safetensors")
    model.config.save_pretrained(partial)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, partial)
    remove(folder)
    partial.rename(folder)
    return folder


class Shapes:
    """A model of transformers as shapes without values: enough for plans and predictions."""

    def __init__(self, name: str, config: Mapping[str, Any] | None = None) -> None:
        """`config`: the model's, if its name is none of `SHAPES`."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self.source = name
        made = AutoConfig.for_model(**(SHAPES[name] if config is None else config))
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
        self.config: dict[str, Any] = made.to_dict()
        self.tensors: Mapping[str, Tensor] = dict(model.state_dict())

    def __contains__(self, name: object) -> bool:
        return name in self.tensors and not (
            name == "lm_head.weight" and self.config.get("tie_word_embeddings")
        )

    def names(self) -> list[str]:
        return sorted(name for name in self.tensors if name in self)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> Tensor:
        """Zeros for a tensor of one axis: options of families read no other. Raises CetaneError for
        more axes."""
        tensor = self.tensors[name]
        if tensor.ndim > 1:
            raise CetaneError(f"{self.source} is shapes alone: {name} has no values")
        return torch.zeros(tensor.shape, device="cpu")  # plans are made on the meta device

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        raise CetaneError(f"{self.source} is shapes alone: {name} has no values")
