"""The text part of multimodal checkpoints: its place in their configs, and its tensors' names.

Sources: the released Gemma 3 (4B and up), Gemma 3n, Gemma 4 and Qwen3.5 checkpoints, and what
transformers 5 reads and writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cetane.checkpoint.stored_tensors import StoredTensor
from cetane.errors import CetaneError

_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "lfm2_vl": "lfm2",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2",
    "qwen2_vl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3",
    "smolvlm": "llama",
}
_ANY_TEXT = {"idefics3", "internvl", "lfm2_vl", "llava", "mistral3", "smolvlm"}
"""Kinds whose text part is of any type, as Ministral 3's is. The above counts if it does not say.
"""
_FLAT = {"qwen2_5_vl", "qwen2_vl"}
"""Kinds whose released configs have the keys of the text part beside the others."""
_THREE_POSITIONS = {"qwen2_5_vl", "qwen2_vl", "qwen3_vl"}
"""Kinds that give each of a picture's tokens three positions. Those of a text's token are equal, so
its queries and keys get positions as in a Qwen without pictures."""
_TIED = {
    "gemma3": True, "gemma3n": True, "gemma4": True, "gemma4_unified": True, "idefics3": False,
    "internvl": True, "lfm2_vl": True, "llava": False, "mistral3": True, "smolvlm": False,
}  # fmt: skip
"""Whether the head of a kind is tied if the whole model's config does not say, as in transformers.
Of other kinds, the text part says it."""
_SOFTCAP = "final_logit_softcapping"
"""A softcap that Gemma 4's whole model applies as its text part does, but Gemma 3's does not."""
_PREFIXES = {
    "model.language_model.": "model.",  # transformers 5
    "model.text_model.": "model.",  # of a SmolVLM or an Idefics 3
    **{f"model.{part}.": f"model.{part}." for part in ("embed_tokens", "layers", "norm")},
    "language_model.model.": "model.",  # before that
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def has_text_part(config: dict[str, Any]) -> bool:
    """Whether this is the config.json of a multimodal model with a text part."""
    kind = str(config.get("model_type"))
    return kind in _TEXT_TYPES and ("text_config" in config or kind in _FLAT)


def text_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of the text part. The whole model's config says whether its head is tied.

    Raises CetaneError for a text part that has other logits alone than in the whole model.
    """
    kind, text = config["model_type"], config.get("text_config", config)
    if not isinstance(text, dict):
        raise CetaneError(f"{path}: text_config is not an object")
    if kind == "gemma3" and text.get(_SOFTCAP) is not None:
        raise CetaneError(
            f"{path}: text_config.{_SOFTCAP} is {text[_SOFTCAP]}: in transformers, the whole model "
            "ignores it, but the text part alone applies it",
            f"write null for {_SOFTCAP}, as in released models, or save the text part alone",
        )
    own = text.get("model_type") if kind in _ANY_TEXT else None
    text = {**text, "model_type": own or _TEXT_TYPES[kind]}
    for name in ("vision_config", "tie_embedding"):  # LFM2's second name for the tie
        text.pop(name, None)
    if kind in _THREE_POSITIONS:
        for key in ROPES:
            if isinstance(text.get(key), dict):
                text[key] = of_one_position(text[key])
        if text.get("tie_word_embeddings"):
            return text  # transformers counts it, whatever the whole model's config says
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    elif kind in _TIED:
        text["tie_word_embeddings"] = _TIED[kind]
    return text


ROPES = ("rope_parameters", "rope_scaling")
"""The keys of rotary parameters."""


def of_one_position(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters without those of a picture's positions."""
    made = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in made.items()}


def text_tensors(tensors: dict[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """The text part's tensors, by the names of a text model.

    `path` is the checkpoint's config.json. Raises CetaneError for two tensors of one name.
    """
    found: dict[str, str] = {}
    for name in tensors:
        ours = text_name(name)
        if ours in found:
            raise CetaneError(
                f"{path.parent} holds {found[ours]} and {name}, which are one tensor of the text",
                "get the model again, or save it with transformers",
            )
        if ours is not None:
            found[ours] = name
    return {ours: tensors[name] for ours, name in found.items()}


def text_name(name: str) -> str | None:
    """The text model's name of a tensor, by a multimodal model's; None for other tensors."""
    return next(
        (ours + name.removeprefix(t) for t, ours in _PREFIXES.items() if name.startswith(t)), None
    )
