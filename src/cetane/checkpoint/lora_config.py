"""The config of a LoRA adapter, adapter_config.json, as peft 0.21 writes it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from cetane.errors import CetaneError
from cetane.files import read_json
from cetane.validation import Data, Finite, validated

MERGED_ELSEWHERE = "merge it with peft (merge_and_unload), and give the merged model"
LARGEST_RANK = 4096
NEUTRAL = {
    "auto_mapping", "inference_mode", "task_type", "peft_version", "target_modules",
    "exclude_modules", "lora_dropout", "fan_in_fan_out", "modules_to_save", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Keys that do not change what an adapter computes: the file's tensors say what it changes. peft
itself ignores `fan_in_fan_out` for linear layers, and all layers here are linear."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""
ATOM = r"(?:[\w.-]|\\[.d]|\[[\w-]+\])"
PATTERN = re.compile(rf"\^?(?:{ATOM}[*+]?)+\$?")
MOST_REPEATS, LONGEST_PATTERN, MOST_PATTERNS = 2, 200, 1024
"""Patterns of names are regular expressions of an untrusted file: without groups and with few
repeats, a match takes no long time. Each module is matched with all of them; the largest adapters
name each of some 900 modules."""
Pattern = Annotated[str, Field(max_length=LONGEST_PATTERN)]
Rank = Annotated[int, Field(ge=1, le=LARGEST_RANK, strict=True)]  # peft takes it as it is


class LoraConfig(Data):
    """The keys of adapter_config.json that decide what an adapter computes."""

    peft_type: str = ""
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: Rank
    lora_alpha: Finite
    rank_pattern: dict[Pattern, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, Finite] = Field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(matching(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """The factor on `up @ down`."""
        alpha = self.alpha_pattern.get(matching(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that a module's path ends with, as in peft; else the path."""
    return next((p for p in patterns if compiled(p).match(module)), module)


@lru_cache(2 * MOST_PATTERNS)  # for each module again; re itself keeps 512
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def read_config(path: Path) -> LoraConfig:
    """The config of an adapter. CetaneError names a key that would change what it computes."""
    content = read_json(path, unique=True)
    kind = content.get("peft_type")
    if kind is None and "lora_parameters" in content:
        base, folder = (shlex.quote(str(p)) for p in (content.get("model") or "BASE", path.parent))
        raise CetaneError(
            f"{path} is of mlx-lm; only adapters of peft are known",
            f"merge it: mlx_lm.fuse --model {base} --adapter-path {folder} --save-path merged; "
            "then give the folder merged",
        )
    if kind != "LORA":
        raise CetaneError(f"{path}: peft_type is {kind!r}; only LORA is known", MERGED_ELSEWHERE)
    known = LoraConfig.model_fields.keys()
    for key, value in content.items():
        if key not in known and key not in NEUTRAL and value:
            raise CetaneError(f"{path}: {key} is not known here", MERGED_ELSEWHERE)
    config = validated(LoraConfig, {k: v for k, v in content.items() if k in known}, str(path))
    if config.init_lora_weights not in PLAIN_STARTS:
        raise CetaneError(
            f"{path}: init_lora_weights = {config.init_lora_weights!r} also changed the base",
            "convert it with peft: save_pretrained(..., path_initial_model_for_weight_conversion)",
        )
    for key, patterns in (("rank", config.rank_pattern), ("alpha", config.alpha_pattern)):
        if len(patterns) > MOST_PATTERNS:
            raise CetaneError(
                f"{path}: {key}_pattern has {len(patterns):,} entries, more than {MOST_PATTERNS:,}",
                MERGED_ELSEWHERE,
            )
        for pattern in patterns:
            check_pattern(pattern, path)
    return config


def check_pattern(pattern: str, path: Path) -> None:
    """Raise CetaneError for a pattern of names that might take long to match, or that is none."""
    if not is_plain(pattern):
        raise CetaneError(
            f"{path}: the pattern {pattern!r} is not a plain name of a module",
            "write names of modules, such as layers.0.self_attn.q_proj",
        )


def is_plain(pattern: str) -> bool:
    """Whether a pattern of names compiles, and is soon matched."""
    repeats = pattern.count("*") + pattern.count("+")
    if not PATTERN.fullmatch(pattern) or repeats > MOST_REPEATS:
        return False
    try:
        re.compile(pattern)
    except re.error:  # [z-a]
        return False
    return True
