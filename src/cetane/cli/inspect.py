"""cetane inspect: the content of a checkpoint."""

from collections.abc import Sequence
from typing import Any

from cetane.cli.options import Adapters, Json, Lora, Model, parse_adapters
from cetane.cli.output import Unbroken, facts, print_json, progress, say, table, warn

SHOWN = 6
"""Names of a list that are shown."""


def inspect(model: Model, lora: Lora = None, adapter: Adapters = None, json: Json = False) -> None:
    """Show what a checkpoint and its adapters hold.

    It reads no weights. A model is supported if cetane has its family and can make what its config
    describes. cetane plan tells whether tokenizer and tensors fit too.
    """
    with progress("inspect"):  # which imports for seconds
        from cetane.pipeline.inspect import inspect as look

        content = look(model, lora, parse_adapters(adapter))
    if json:
        print_json(content)
        return
    names = {"model type": "model_type", "tokens": "tokenizer_vocabulary"}
    shown = {
        "source": Unbroken(content["source"]),
        **{name: content[key] for name, key in names.items()},
        **({"text part of": content["part_of"]} if content["part_of"] else {}),
        "supported": supported(content),
        **({"quantised": content["quantization"]} if content["quantization"] else {}),
        "parameters": f"{content['parameters'] / 1e6:.1f} million",
        "dtypes": ", ".join(f"{count} of {kind}" for kind, count in content["dtypes"].items()),
    }
    facts(shown, "checkpoint")
    tensors = content["tensors"]
    rows = [[name, "x".join(map(str, shape))] for name, shape in list(tensors.items())[:12]]
    table("tensors", ["name", "shape"], rows)
    if len(tensors) > len(rows):
        say(f"... and {len(tensors) - len(rows)} more (--json lists all)")
    for name, about in content["adapters"].items():
        show_adapter(name, about)
    if content["nearest"]:
        show_nearest(content["nearest"])
    if content["unread"]:
        warn(
            f"warning: the model reads nothing from {', '.join(content['unread'][:3])} "
            f"({len(content['unread'])} tensors)"
        )


def supported(content: dict[str, Any]) -> str:
    """Whether a model is supported; if not, and no table about the nearest family says it, why."""
    if content["supported"]:
        return "yes, of text only" if content["part_of"] else "yes"
    return "no" if content["nearest"] else f"no: {content['refusal']}"


def show_adapter(name: str, about: dict[str, Any]) -> None:
    """What an adapter states and changes."""
    kind = f"rank {about['rank']}{', DoRA' if about['dora'] else ''}"
    facts(
        {
            "folder": Unbroken(about["folder"]),
            "states its base as": about["stated_base"] or "nothing",
            "changes": f"{about['changes']} weights, {kind}",
            "replaces": some(about["replaces"]),
        },
        f"adapter {name}",
    )


def show_nearest(near: dict[str, Any]) -> None:
    """What keeps the nearest family from being the model's."""
    from cetane.families import ADDING

    facts(
        {
            "reads": f"{near['reads']} of {near['tensors']} tensors",
            "does not read": some(near["unread"]),
            "misses": some(near["missing"]),
            "keys it does not read": some(near["keys"]),
            "how to add a family": ADDING,
        },
        f"not supported; the nearest family is {near['model_type']}",
    )


def some(names: Sequence[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more or "nothing"
