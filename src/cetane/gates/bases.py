"""Is an adapter's base the base here? Evidence beyond the shapes, which are checked on opening.

An adapter's config only names its base. If a model of that name is on this machine, its weights
are compared with those here. Nothing is downloaded for it.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from cetane.checkpoint import Checkpoint
from cetane.checkpoint.hub import downloaded
from cetane.checkpoint.lora import FLOATS, Lora
from cetane.checkpoint.open import open_base
from cetane.errors import CetaneError
from cetane.gates.verdict import Check, at_most

STATED = "weights of its stated base"
"""The name of this check, after the adapter's."""
SAMPLES, ROWS = 4, 64
"""The weights that are compared, and the rows of each."""
SAME, QUANTIZED = 0.01, 0.3
"""The largest relative distance at which weights count as equal: of another float format, and of
quantised weights. bfloat16 rounds by 0.004, a 4-bit format by about 0.1. Two models differ by about
1.4."""


def base_checks(checkpoint: Checkpoint) -> Iterator[Check]:
    """A check for every adapter whose stated base is on this machine.

    A merged adapter has the name `lora`."""
    merged = checkpoint.merged
    adapters: Mapping[str, Lora] = dict(checkpoint.adapters)
    if len(merged) == 1 and not adapters:
        adapters = {"lora": merged[0]}
    elif merged:
        return  # an adapter may state the base before or after the merge
    for name, lora in adapters.items():
        stated = stated_base(lora)
        if stated is not None:
            yield distance(f"{name}: {STATED}", checkpoint, stated, lora)


def unknown_bases(checkpoint: Checkpoint) -> Iterator[str]:
    """Warnings about adapters whose stated base is not on this machine."""
    for lora in (*checkpoint.merged, *checkpoint.adapters.values()):
        name = lora.config.base_model_name_or_path
        if not name:
            yield f"{lora.folder} states no base: only shapes were compared"
        elif stated_base(lora) is None:
            yield (
                f"{lora.folder} states the base {name}, which is not on this machine: only shapes "
                "were compared"
            )


def stated_base(lora: Lora) -> Checkpoint | None:
    """The base that an adapter's config names, if it is on this machine."""
    stated = lora.config.base_model_name_or_path
    if not stated:
        return None
    with suppress(CetaneError, OSError):
        if Path(stated).exists():
            return open_base(stated, connect=False)
    with suppress(CetaneError, OSError):
        return open_base(downloaded(stated, lora.config.revision))
    return None


def distance(what: str, checkpoint: Checkpoint, stated: Checkpoint, lora: Lora) -> Check:
    """The check of the largest relative distance of two bases, over a few weights that the adapter
    changes, each by its first rows. It fails if the stated base lacks a weight of this shape."""
    here, names = checkpoint.unchanged, sorted(lora.changes)
    names = names[:: max(1, len(names) // SAMPLES)][:SAMPLES]
    if any(name not in stated or stated.shape(name) != here.shape(name) for name in names):
        return at_most(what, float("inf"), SAME)
    kinds = {base.dtype(name) for base in (here, stated) for name in names}
    gaps = []
    for name in names:
        rows = min(ROWS, here.shape(name)[0])
        ours, theirs = (base.read_rows(name, 0, rows).float() for base in (here, stated))
        length = torch.linalg.vector_norm(theirs).clamp_min(1e-30)
        gaps.append(float(torch.linalg.vector_norm(ours - theirs) / length))
    return at_most(what, max(gaps), SAME if kinds <= set(FLOATS) else QUANTIZED)
