"""A GGUF file and what every model type has in its config; the functions that add to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cetane.checkpoint.gguf.file import GGUFFile
from cetane.checkpoint.gguf.keys import Keys
from cetane.errors import CetaneError

SOFTMAX, SIGMOID = 1, 2
"""llama.cpp's numbers for experts weighed by a softmax, and by a sigmoid of each."""


@dataclass(frozen=True)
class Facts:
    """A file, and what every model type has in its config."""

    file: GGUFFile
    keys: Keys
    config: dict[str, Any]
    rotary_width: int
    """The channels of an attention head that rotate."""

    @property
    def rope(self) -> dict[str, Any]:
        parameters: dict[str, Any] = self.config["rope_parameters"]
        return parameters

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])

    @property
    def turned_part(self) -> dict[str, Any]:
        """The rotary parameters of heads that rotate in part."""
        return self.rope | {"partial_rotary_factor": self.rotary_width / self.config["head_dim"]}

    @property
    def biased(self) -> dict[str, Any]:
        """Whether queries, keys and values have biases."""
        return {"attention_bias": self.has("attn_q.bias")}

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of the first layer."""
        return f"blk.0.{tensor}" in self.file.tensors

    def rows(self, tensor: str) -> int:
        """The number of rows of a tensor of the first layer; 0 if it is missing."""
        stored = self.file.tensors.get(f"blk.0.{tensor}")
        return stored.shape[0] if stored is not None and stored.shape else 0

    def windows(self, slides: list[bool]) -> dict[str, Any]:
        """The window of the layers that slide, and the type of every layer."""
        return {
            "sliding_window": self.keys.integer("attention.sliding_window"),
            "layer_types": self.kinds("sliding_attention", "full_attention", slides),
        }

    @property
    def sigmoid_experts(self) -> dict[str, Any]:
        """Experts weighed by a sigmoid of each. CetaneError for other weights."""
        keys, gating = self.keys, self.keys.get("expert_gating_func")
        if gating not in (None, SIGMOID):
            raise keys.bad("expert_gating_func", f"{SIGMOID}, which alone is supported", gating)
        return {
            "n_group": keys.integer("expert_group_count", 1),
            "topk_group": keys.integer("expert_group_used_count", 1),
            "norm_topk_prob": keys.get("expert_weights_norm") is True,
            "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        }

    def check(self, key: str, value: object, *, missing: bool = True) -> None:
        """Refuse another value of a key than the only one that transformers computes."""
        found = self.keys.get(key)
        if (found is None and missing) or (type(found) is type(value) and found == value):
            return
        raise self.keys.bad(key, f"{value}, which alone is supported", found)

    def kinds(self, first: str, second: str, chosen: list[bool]) -> list[str]:
        """The first kind where a layer is chosen, else the second."""
        return [first if one else second for one in chosen]


Own = Callable[[Facts], dict[str, Any]]
OWN: dict[str, Own] = {}
"""What a model type adds, by its name."""


def of(*model_types: str) -> Callable[[Own], Own]:
    def enter(own: Own) -> Own:
        OWN.update(dict.fromkeys(model_types, own))
        return own

    return enter


def yarn_scales(facts: Facts, unit: float) -> dict[str, Any]:
    """The two scales of yarn, equal in all releases. The file has one number: `unit` times them.

    The converter writes 0 for a plain yarn, without such scales."""
    key = "rope.scaling.yarn_log_multiplier"
    value = facts.keys.get(key)
    if value is None or (type(value) is float and value == 0.0):
        return {}
    scale = round(facts.keys.number(key) / unit, 6)  # the file has it in fp32
    return {"mscale": scale, "mscale_all_dim": scale}


def trained_context(facts: Facts) -> int:
    key = "rope.scaling.original_context_length"
    return facts.keys.integer(key, facts.config["max_position_embeddings"])


def two_tables(facts: Facts) -> dict[str, Any]:
    """The factors of short and of long texts, if the file has them."""
    file, trained = facts.file, trained_context(facts)
    if "rope_factors_long.weight" not in file.tensors:
        return {}
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": trained,
        "factor": facts.config["max_position_embeddings"] / trained,
    }
    for name in ("short", "long"):
        stored = file.tensors.get(f"rope_factors_{name}.weight")
        if stored is None:
            raise CetaneError(f"{file.path} has no rope_factors_{name}.weight")
        if stored.dtype != "F32" or stored.shape != (facts.rotary_width // 2,):
            raise CetaneError(
                f"{file.path}: rope_factors_{name}.weight is {stored.dtype} of {stored.shape}"
            )
        rope[f"{name}_factor"] = np.frombuffer(stored.read(), np.float32).tolist()
    return rope


def check_one_base(facts: Facts) -> None:
    """Refuse another rotary base of sliding layers: llama.cpp reads it, transformers has none."""
    key, base = "rope.freq_base_swa", facts.rope["rope_theta"]
    if facts.keys.number(key, base) != base:
        expected = f"{base}, the base of all layers of this architecture"
        raise facts.keys.bad(key, expected, facts.keys.get(key))
