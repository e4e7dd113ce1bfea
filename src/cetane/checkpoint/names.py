"""The name of a model, as packages and model cards give it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""An id of a repository on the Hugging Face hub: "org/name"."""


def model_name(source: str, config: Mapping[str, Any] | None = None) -> str:
    """The model's id on the hub, if the source or the config is one; else its file's name.

    A local path may look like an id, so it is one only if nothing is there.
    """
    stated = (config or {}).get("_name_or_path")
    if HUB_ID.fullmatch(source) and not Path(source).exists():
        return source
    if isinstance(stated, str) and HUB_ID.fullmatch(stated):
        return stated
    return Path(source).name.removesuffix(".gguf").removesuffix(".safetensors")
