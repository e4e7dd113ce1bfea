"""cetane inspect: what a checkpoint holds."""

from collections import Counter
from math import prod

from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, Model, console, errors, print_json, table
from cetane.errors import CetaneError
from cetane.families import author, families, unread, warn_unread


def inspect(model: Model, json: Json = False) -> None:
    """Show what a checkpoint holds, without reading weights."""
    checkpoint = open_checkpoint(model)
    names = checkpoint.names()
    kind = checkpoint.config.get("model_type")
    try:
        vocabulary = checkpoint.tokenizer.vocab_size
    except CetaneError:
        vocabulary = None
    try:
        known = author(checkpoint.config, "c1t", {}, checkpoint)
    except CetaneError:  # a model that cetane does not know reads nothing
        known = None
    content = {
        "source": checkpoint.source,
        "model_type": kind,
        "supported": isinstance(kind, str) and kind in families(),
        "quantization": checkpoint.quantization,
        "parameters": sum(prod(checkpoint.shape(name)) for name in names),
        "dtypes": dict(Counter(checkpoint.dtype(name) for name in names)),
        "tokenizer_vocabulary": vocabulary,
        "unread": unread(names, known) if known else [],
        "config": checkpoint.config,
        "tensors": {name: list(checkpoint.shape(name)) for name in names},
    }
    if json:
        print_json(content)
        return
    shown = (
        "source",
        "model_type",
        "supported",
        "quantization",
        "parameters",
        "dtypes",
        "tokenizer_vocabulary",
    )
    table("checkpoint", ["what", "value"], [[key, content[key]] for key in shown])
    rows = [[n, "x".join(map(str, checkpoint.shape(n))), checkpoint.dtype(n)] for n in names[:12]]
    table("tensors", ["name", "shape", "dtype"], rows)
    if len(names) > len(rows):
        console.print(f"... and {len(names) - len(rows)} more (--json lists all)")
    if known and (warning := warn_unread(names, known)):
        errors.print(f"warning: {warning}", markup=False, soft_wrap=True)
