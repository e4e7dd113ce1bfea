"""Architectures re-authored for the ANE, one file each; a file is found by its MODEL_TYPES."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from cetane.errors import CetaneError
from cetane.families.base import Model
from cetane.families.layers import Order

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "sliding_window", "max_position_embeddings",
)  # fmt: skip


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
    parsed = parse_config(config)
    return families()[parsed.model_type](parsed, order)


def parse_config(config: dict[str, Any]) -> Any:
    """The transformers config of a `config.json`; CetaneError when it is unknown or not valid."""
    known = families()
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise CetaneError(
            f"unknown architecture {kind!r}; known: {', '.join(sorted(known))}",
            "CONTRIBUTING.md tells how to add a family in one file",
        )
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    settings = {key: value for key, value in config.items() if key != "model_type"}
    try:
        parsed = AutoConfig.for_model(kind, **settings)
    except (TypeError, ValueError, KeyError, ArithmeticError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise CetaneError(f"config.json of a {kind} model is not valid: {reason}") from error
    check_sizes(parsed)
    return parsed


def check_sizes(config: Any) -> None:
    """CetaneError for sizes that no model has; transformers lets them pass."""
    where = f"config.json of a {config.model_type} model is not valid"
    for name in SIZES:
        size = getattr(config, name, None)
        if size is not None and size < 1:
            raise CetaneError(f"{where}: {name} = {size}")
    query, kv = config.num_attention_heads, config.num_key_value_heads
    if query % kv:
        raise CetaneError(
            f"{where}: num_attention_heads = {query} is no multiple of num_key_value_heads = {kv}"
        )
