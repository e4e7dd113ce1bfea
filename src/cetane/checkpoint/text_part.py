"""The text part of multimodal checkpoints: its place in their configs, and its tensors' names.

Sources: the released Gemma 3 (4B and up), Gemma 3n, Gemma 4 and Qwen3.5 checkpoints, and what
transformers 5 reads and writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cetane.checkpoint.stored_tensors import StoredTensor
from cetane.errors import CetaneError


@dataclass(frozen=True)
class TextPart:
    """The text part of a kind of multimodal models."""

    type: str
    """Its type: always if `fixed`, else where its config does not say."""
    fixed: bool = False
    tied: bool | None = None
    """Whether the head is tied if the whole model's config does not say, as in transformers; None
    where the text part says it."""
    flat: bool = False
    """Whether released configs have its keys beside the others."""
    three_positions: bool = False
    """Whether each of a picture's tokens has three positions. Those of a text's token are equal, so
    its queries and keys get positions as in a Qwen without pictures."""


_KINDS = {
    "aya_vision": TextPart("cohere2", tied=True),
    "cohere2_vision": TextPart("cohere2", tied=True),
    "deepseek_vl": TextPart("llama", tied=True),
    "exaone4_5": TextPart("exaone4", tied=False),
    "fast_vlm": TextPart("qwen2", tied=False),
    "gemma3": TextPart("gemma3_text", fixed=True, tied=True),
    "gemma3n": TextPart("gemma3n_text", fixed=True, tied=True),
    "gemma4": TextPart("gemma4_text", fixed=True, tied=True),
    "gemma4_unified": TextPart("gemma4_unified_text", fixed=True, tied=True),
    "glmasr": TextPart("llama", tied=True),
    "got_ocr2": TextPart("qwen2", tied=True),
    "granite_speech": TextPart("granite", tied=True),
    "idefics2": TextPart("mistral", tied=False),
    "idefics3": TextPart("llama", tied=False),
    "internvl": TextPart("qwen2", tied=True),
    "janus": TextPart("llama", tied=True),
    "lfm2_vl": TextPart("lfm2", tied=True),
    "lfm3_vl": TextPart("lfm3", tied=True),
    "lighton_ocr": TextPart("qwen3", tied=True),
    "llama4": TextPart("llama4_text", fixed=True),
    "llava": TextPart("llama", tied=False),
    "llava_next": TextPart("llama", tied=False),
    "llava_next_video": TextPart("llama", tied=False),
    "llava_onevision": TextPart("qwen2", tied=False),
    "minicpmv4_6": TextPart("qwen3_5_text", tied=False),
    "minicpmv4_7": TextPart("qwen3_5_text", tied=False),
    "mistral3": TextPart("mistral", tied=True),
    "ovis2": TextPart("qwen2", tied=True),
    "perception_lm": TextPart("llama", tied=False),
    "qwen2_5_vl": TextPart("qwen2", fixed=True, flat=True, three_positions=True),
    "qwen2_audio": TextPart("qwen2"),
    "qwen2_vl": TextPart("qwen2", fixed=True, flat=True, three_positions=True),
    "qwen3_5": TextPart("qwen3_5_text", fixed=True),
    "qwen3_5_moe": TextPart("qwen3_5_moe_text", fixed=True),
    "qwen3_asr": TextPart("qwen3", tied=True),
    "qwen3_vl": TextPart("qwen3", fixed=True, three_positions=True),
    "smolvlm": TextPart("llama", tied=False),
    "video_llama_3": TextPart("qwen2", tied=False),
    "video_llava": TextPart("llama", tied=False),
    "vipllava": TextPart("llama", tied=False),
    "voxtral": TextPart("llama"),
}
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
    part = _KINDS.get(str(config.get("model_type")))
    return part is not None and ("text_config" in config or part.flat)


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
    part = _KINDS[kind]
    own = None if part.fixed else text.get("model_type")
    text = {**text, "model_type": own or part.type}
    for name in ("vision_config", "tie_embedding"):  # LFM2's second name for the tie
        text.pop(name, None)
    if part.three_positions:
        for key in ROPES:
            if isinstance(text.get(key), dict):
                text[key] = of_one_position(text[key])
        if text.get("tie_word_embeddings"):
            return text  # transformers counts it, whatever the whole model's config says
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    elif part.tied is not None:
        text["tie_word_embeddings"] = part.tied
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
