"""The text part of multimodal checkpoints: its place in their configs, and its tensors' names.

Sources: the released Gemma 3 (4B and up), Gemma 3n, Gemma 4 and Qwen3.5 checkpoints, and what
transformers 5 writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cetane.checkpoint.checkpoint import StoredTensor
from cetane.errors import CetaneError

_TEXT_TYPES = {
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_TIED = {"gemma3", "gemma3n", "gemma4", "mistral3"}
"""Kinds whose head is tied if the whole model's config does not say, as in transformers."""
_SOFTCAP = "final_logit_softcapping"
"""A softcap that Gemma 4's whole model applies as its text part does, but Gemma 3's does not."""
_PREFIXES = {
    "model.language_model.": "model.",  # transformers 5
    "language_model.model.": "model.",  # before that
    "language_model.lm_head.": "lm_head.",
    "lm_head.": "lm_head.",
}


def has_text_part(config: dict[str, Any]) -> bool:
    """Whether this is the config.json of a multimodal model with a text part."""
    return str(config.get("model_type")) in _TEXT_TYPES and "text_config" in config


def text_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config of the text part. The whole model's config says whether its head is tied.

    Raises CetaneError for a text part that has other logits alone than in the whole model.
    """
    text = config["text_config"]
    if not isinstance(text, dict):
        raise CetaneError(f"{path}: text_config is not an object")
    if config["model_type"] == "gemma3" and text.get(_SOFTCAP) is not None:
        raise CetaneError(
            f"{path}: text_config.{_SOFTCAP} is {text[_SOFTCAP]}: in transformers, the whole model "
            "ignores it, but the text part alone applies it",
            f"write null for {_SOFTCAP}, as in released models, or save the text part alone",
        )
    kind = _TEXT_TYPES[config["model_type"]]
    if config["model_type"] == "mistral3":  # its text part is of any type, as Ministral 3's is
        kind = text.get("model_type", kind)
    text = {**text, "model_type": kind}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    elif config["model_type"] in _TIED:
        text["tie_word_embeddings"] = True
    return text


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
