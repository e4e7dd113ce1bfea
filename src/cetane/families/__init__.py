"""Architectures re-authored for the ANE, one file each; a file is found by its MODEL_TYPES."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from cetane.errors import CetaneError
from cetane.families.base import Model
from cetane.families.layers import Order


def families() -> dict[str, Callable[[Any, Order], Model]]:
    """`author` functions by model type."""
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    return {kind: m.author for m in modules for kind in getattr(m, "MODEL_TYPES", ())}


def author(config: dict[str, Any], order: Order = "c1t") -> Model:
    """Re-author the architecture that a Hugging Face `config.json` describes, without weights.

    `order` is the layout of hidden tensors.
    """
    known = families()
    kind = config.get("model_type")
    if kind not in known:
        raise CetaneError(
            f"unknown architecture {kind!r}; known: {', '.join(sorted(known))}",
            "CONTRIBUTING.md tells how to add a family in one file",
        )
    from transformers import AutoConfig

    settings = {key: value for key, value in config.items() if key != "model_type"}
    try:
        parsed = AutoConfig.for_model(kind, **settings)
    except (TypeError, ValueError, KeyError) as error:
        raise CetaneError(f"config.json of a {kind} model is not valid: {error}") from error
    return known[kind](parsed, order)
