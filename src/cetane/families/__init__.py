"""Families: architectures written anew for the ANE, one file each.

A family is a module with `MODEL_TYPES`, a class `Options` for its choices (a recipe's `[family]`
table), and `author(config, options)`, which makes a `Model` without weights. It may have
`DEPARTURES`, by name. Other rooms use the names below and no module of this folder.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

import torch

from cetane.errors import CetaneError
from cetane.families.adapters import adapt
from cetane.families.axes import Axes, tensor_layout
from cetane.families.base import (
    Bits,
    Block,
    Flow,
    Memory,
    Part,
    RoutedBlock,
    Truth,
    Weight,
    Weights,
    check_finite,
    largest_of,
)
from cetane.families.caches import (
    Blend,
    CacheForm,
    CacheSpec,
    ReadOnly,
    Stateful,
    cache_form,
)
from cetane.families.configs import (
    KNOWN,
    MALFORMED,
    CheckedConfig,
    check_counts,
    check_sizes,
    decoded,
    invalid,
)
from cetane.families.delta import RAISED_ANSWERS
from cetane.families.grouped_query import LEAST_SCALE, LONGEST_BLOCK, AttentionHeads, attend
from cetane.families.layers import (
    SOFTPLUS_MOST,
    Exchange,
    Held,
    Projection,
    RMSNorm,
    apply_rotary,
)
from cetane.families.model import (
    CacheGroup,
    Departure,
    Head,
    History,
    Lookup,
    Matrix,
    Model,
    StoredTable,
    TokenTable,
)
from cetane.families.pasts import HistorySpec, MatrixSpec
from cetane.families.rotary import RotaryTable, last_to_halves
from cetane.families.rotation import rotated
from cetane.families.shard import Shard
from cetane.families.streaming import streamed, streaming_layers, with_streaming
from cetane.files import documentation
from cetane.hardware.quiet import quiet_transformers
from cetane.schema.interface import Order
from cetane.validation import validated

__all__ = [
    "ADDING",
    "LEAST_SCALE",
    "LONGEST_BLOCK",
    "RAISED_ANSWERS",
    "SOFTPLUS_MOST",
    "AttentionHeads",
    "Axes",
    "Bits",
    "Blend",
    "Block",
    "CacheForm",
    "CacheGroup",
    "CacheSpec",
    "Exchange",
    "Flow",
    "Head",
    "Held",
    "History",
    "HistorySpec",
    "Lookup",
    "Matrix",
    "MatrixSpec",
    "Memory",
    "Model",
    "Part",
    "Projection",
    "RMSNorm",
    "ReadOnly",
    "RotaryTable",
    "RoutedBlock",
    "Shard",
    "Stateful",
    "StoredTable",
    "TokenTable",
    "Truth",
    "Weight",
    "Weights",
    "adapt",
    "apply_rotary",
    "attend",
    "author",
    "cache_form",
    "check_finite",
    "families",
    "largest_of",
    "last_to_halves",
    "options_of",
    "parse_config",
    "rotated",
    "streamed",
    "streaming_layers",
    "tensor_layout",
    "unread",
    "warn_unread",
    "with_streaming",
]

ADDING = documentation("how-to/add-a-family.md")
"""The page for a model that cetane does not know."""


def families() -> dict[str, ModuleType]:
    """The family modules, by model type."""
    modules = (
        importlib.import_module(f"{__name__}.{module.name}")
        for module in pkgutil.iter_modules(__path__)
    )
    return {kind: module for module in modules for kind in getattr(module, "MODEL_TYPES", ())}


def author(
    config: dict[str, Any],
    order: Order,
    options: dict[str, Any],
    weights: Weights,
    bits: Bits | None = None,
) -> Model:
    """The model that a Hugging Face `config.json` describes, in ANE form and without weights.

    `order` is the layout of hidden tensors, `options` the recipe's `[family]` table. Only
    departures read `weights`. With `bits`, projections on the notch (`cetane.hardware.notch`) are
    split in two. Blocks are not changed afterwards, so plans can share them. Raises CetaneError for
    a wrong config or wrong options.
    """
    parsed = parse_config(config)
    kind = parsed.model_type
    departures = chosen_departures(kind, options)
    chosen = options_of(kind, options)
    with tensor_layout(order):
        try:
            model: Model = families()[kind].author(CheckedConfig(parsed), chosen)
        except MALFORMED as error:
            reason = str(error).partition("\n")[0]  # torch adds the place in its own code
            raise invalid(kind, reason) from error
        with torch.device("meta"):
            for depart in departures:
                model = depart(model, weights)
    if bits is not None:
        model = model.split_contracting(bits)
    return model


def chosen_departures(kind: str, options: Mapping[str, Any]) -> list[Departure]:
    """The departures that a `[family]` table asks for, in the order in which they are applied."""
    known = known_departures(kind) if "departures" in options else {}
    if not known:
        return []
    names = options["departures"]
    if not isinstance(names, list | tuple):
        raise CetaneError(f"family.departures: {names!r} is not a list of names")
    for index, name in enumerate(names):
        if name not in known:
            raise CetaneError(
                f"family.departures.{index}: no departure {name!r}; known: {', '.join(known)}"
            )
    return [depart for name, depart in known.items() if name in names]


def known_departures(kind: str) -> Mapping[str, Departure]:
    """The departures of an architecture, by name."""
    return getattr(families()[kind], "DEPARTURES", {})


def options_of(kind: str, options: Mapping[str, Any]) -> Any:
    """A recipe's `[family]` table, without departures, as the family's own `Options`."""
    own = families()[kind].Options
    departs = "departures" in options and bool(known_departures(kind))
    content = {k: v for k, v in options.items() if not (departs and k == "departures")}
    return validated(own, content, f"the [family] options of a {kind} model")


BOTH_WAYS: dict[str, tuple[Any, ...]] = {
    "is_causal": (False, None),
    "use_bidirectional_attention": (True, "all"),
}
"""Keys of a config, and the values with which transformers shows each token the later ones."""
MOST_KEYS = 4096
"""The most keys of a config. Each costs transformers 50 us; the families' own have up to 51."""


def parse_config(config: dict[str, Any]) -> Any:
    """The transformers config of a `config.json`. CetaneError if it is unknown or not valid."""
    known = families()
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        text = config.get("text_config")
        part = text.get("model_type") if isinstance(text, dict) else None
        if isinstance(part, str) and part in known:
            raise CetaneError(
                f"unknown architecture {kind!r}, but its text part is a known one: {part}",
                "save the text part alone with transformers, as a model for text, and port that",
            )
        raise CetaneError(
            f"unknown architecture {kind!r}"
            if "model_type" in config
            else "config.json has no model_type, which names the architecture",
            f"all {len(known)} that are known: {KNOWN}; how to add one: {ADDING}",
        )
    if len(config) > MOST_KEYS:
        raise invalid(kind, f"it has {len(config):,} keys, more than {MOST_KEYS:,}")
    check_counts(kind, config)
    for key, both_ways in BOTH_WAYS.items():
        if key in config and config[key] in both_ways:
            raise CetaneError(f"{key} = {config[key]!r}: only causal models generate text")
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    settings = {key: decoded(value) for key, value in config.items() if key != "model_type"}
    try:
        with quiet_transformers():
            parsed = AutoConfig.for_model(kind, **settings)
    except (*MALFORMED, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise invalid(kind, reason) from error
    check_sizes(parsed)
    return parsed


BUFFERS = (
    ".rotary_emb.inv_freq", ".attention.bias", ".attn.bias", ".masked_bias", ".causal_mask",
)  # fmt: skip
"""Endings of tensors that old checkpoints store beside weights; they follow from the config."""


def unread(names: Iterable[str], model: Model) -> list[str]:
    """The tensors of a checkpoint that the model does not read.

    A few are harmless, such as heads for training. Many are a sign of a misread checkpoint.
    """
    known = model.tensors()
    return [name for name in names if name not in known and not name.endswith(BUFFERS)]


def warn_unread(names: Iterable[str], model: Model) -> str | None:
    """A warning about tensors that the model does not read; None if it reads all."""
    idle = unread(names, model)
    if not idle:
        return None
    more = f" and {len(idle) - 3} more" if len(idle) > 3 else ""
    return f"the model reads nothing from {', '.join(idle[:3])}{more}"
