"""The checkpoint that a bundle was built from, and its adapters."""

from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, TypeVar

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.checkpoint.open import is_remote
from cetane.errors import CetaneError
from cetane.planner import Planner, as_recipe_asks

if TYPE_CHECKING:
    from cetane.gates.golden_result import GoldenResult
    from cetane.gates.layers import LayersResult
    from cetane.gates.quality import TextQuality

Judged = TypeVar("Judged", "GoldenResult", "LayersResult", "TextQuality")


def checkpoint_of(
    bundle: Bundle,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> Checkpoint:
    """The checkpoint of a bundle, with its adapters, from the places in the build's record, or from
    the new places that are given. CetaneError if it is missing there, or has another shape.

    The record is the word of whoever made the bundle: a URL or a model that is not on this machine
    is opened only if `model` names it.
    """
    manifest, recipe = bundle.manifest, bundle.plan.recipe
    merged = lora or (manifest.lora.source if manifest.lora else None)
    unknown = sorted((adapters or {}).keys() - manifest.adapters.keys())
    if unknown:
        raise CetaneError(
            f"{bundle.path} has no adapter {unknown[0]!r}",
            f"it has {', '.join(manifest.adapters) or 'none'}",
        )
    folders = {name: origin.source for name, origin in manifest.adapters.items()}
    folders |= {name: str(folder) for name, folder in (adapters or {}).items()}
    try:
        opened = open_checkpoint(
            model or manifest.source, merged, folders, connect=model is not None
        )
        found = as_recipe_asks(opened, recipe)
    except CetaneError as error:
        if model is not None:
            raise
        source = manifest.source
        trusted = f", or gets it: --model {quote(source)}" if is_remote(source) else ""
        places = [f"--model MODEL says where it is now{trusted}"]
        places += ["--lora FOLDER where the merged adapter is"] if manifest.lora else []
        places += ["--adapter NAME=FOLDER where an adapter is"] if manifest.adapters else []
        raise CetaneError(
            f"the model of {bundle.path} cannot be opened where the build found it: "
            f"{error.message}",
            ", ".join(places),
        ) from error
    check_shape(bundle, found)
    return found


def check_shape(bundle: Bundle, checkpoint: Checkpoint) -> None:
    """Raise CetaneError for a checkpoint of another shape than the bundle's: nothing of the two
    could be compared. Shards tell shapes that no interface shows, such as the width of an MLP."""
    if checkpoint.fingerprint == bundle.manifest.fingerprint:
        return
    ours, theirs = bundle.plan, Planner(checkpoint, bundle.plan.recipe).plan()
    for what in ("architecture", "layers", "hidden", "vocab", "weight_bytes", "shards"):
        if (own := getattr(ours, what)) != (other := getattr(theirs, what)):
            told = "" if what == "shards" else f" {other}, not {own}"
            raise CetaneError(
                f"{checkpoint.source} is another model than {bundle.path} was built from: its "
                f"{what}{told or ' differ'}",
                "--model names the same model in another place, or one of the same shape",
            )


def other_checkpoint(bundle: Bundle, checkpoint: Checkpoint) -> list[str]:
    """A warning if a checkpoint's files are not those that the bundle was made from. If the shape
    is the same, the gates run, and their figures look like those of a bad port."""
    if checkpoint.fingerprint == bundle.manifest.fingerprint:
        return []
    return [f"{checkpoint.source} is not the file that {bundle.path} was made from"]


def with_origin(result: Judged, bundle: Bundle, checkpoint: Checkpoint) -> Judged:
    """A gate's result with the checkpoint that it is about: its place, its fingerprint, and the
    warning of `other_checkpoint` before the result's own.

    A bundle chooses its checkpoint, and a verdict is worth as much as that.
    """
    return result.model_copy(
        update={
            "source": checkpoint.source,
            "fingerprint": checkpoint.fingerprint,
            "warnings": (*other_checkpoint(bundle, checkpoint), *result.warnings),
        }
    )
