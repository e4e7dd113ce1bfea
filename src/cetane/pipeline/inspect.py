"""The contents of a checkpoint."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.lora import Lora
from cetane.errors import CetaneError
from cetane.families import author, families, unread
from cetane.planner.nearest import nearest_family


def inspect(
    model: str | Path,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> dict[str, Any]:
    """A checkpoint's config, its tensors by shape, and its family, if cetane has it.

    Reads no weights. `refusal` is the reason why the family cannot make this model, or None;
    `supported` says that there is none. `plan` refuses more, as a missing tokenizer. `nearest` is
    the family that would read most of a model that cetane does not know, and what it would not
    read. `part_of` is the type of a multimodal model, of which cetane ports the text part; None of
    others. `unread` lists the tensors that the model does not use; many
    of them are a sign of a misread checkpoint. `tokenizer_vocabulary` is None for a missing or
    broken tokenizer, which `plan` refuses. `adapters` has peft adapters by name; the merged one has
    the name `lora`.
    """
    checkpoint = open_checkpoint(model, lora, adapters)
    names = checkpoint.names()
    kind = checkpoint.config.get("model_type")
    try:
        vocabulary: int | None = checkpoint.tokenizer.vocab_size
    except CetaneError:
        vocabulary = None
    known, refusal = None, None
    try:
        known = author(checkpoint.config, "c1t", {}, checkpoint)
    except CetaneError as error:  # such a model reads nothing
        refusal = error.message
    near = None if isinstance(kind, str) and kind in families() else nearest_family(checkpoint)
    return {
        "source": checkpoint.source,
        "model_type": kind,
        "part_of": checkpoint.part_of,
        "supported": refusal is None,
        "refusal": refusal,
        "quantization": checkpoint.quantization,
        "parameters": sum(prod(checkpoint.shape(name)) for name in names),
        "dtypes": dict(Counter(checkpoint.dtype(name) for name in names)),
        "tokenizer_vocabulary": vocabulary,
        "unread": unread(names, known) if known else [],
        "nearest": None if near is None else asdict(near),
        "adapters": {
            name: adapter_content(opened)
            for name, opened in [
                *(("lora", one) for one in checkpoint.merged),
                *checkpoint.adapters.items(),
            ]
        },
        "config": checkpoint.config,
        "tensors": {name: list(checkpoint.shape(name)) for name in names},
    }


def adapter_content(lora: Lora) -> dict[str, Any]:
    """What an adapter states and changes."""
    return {
        "folder": str(lora.folder),
        "stated_base": lora.config.base_model_name_or_path,
        "rank": lora.rank,
        "dora": lora.config.use_dora,
        "changes": len(lora.changes),
        "replaces": sorted(lora.replaced),
    }
