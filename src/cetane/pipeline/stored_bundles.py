"""Whole bundles in the shared store. If somebody has built the same checkpoint by the same recipe,
the bundle is fetched without a plan, so without torch."""

from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.checkpoint.lora import Lora
from cetane.checkpoint.names import model_name
from cetane.errors import CetaneError
from cetane.files import records, write_json
from cetane.schema.manifest import MANIFEST, AdapterSource, Manifest, producers
from cetane.schema.recipe import Recipe
from cetane.store.store import Store, result_path
from cetane.tasks.task import task_key

NOWHERE: dict[str, Any] = {"source": "", "fingerprint": "", "lora": None, "adapters": {}}
"""Fields of a manifest in a store. Checkpoints lie elsewhere on each machine, so the reader fills
these fields in."""


def bundle_key(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """A hash of everything that a bundle depends on, the same on every machine."""
    name = model_name(checkpoint.source, checkpoint.config)
    return task_key(checkpoint.content, recipe.model_dump(mode="json"), producers(), name)


def fetched(store: Store, checkpoint: Checkpoint, recipe: Recipe, target: Path) -> bool:
    """Put the bundle of a checkpoint and a recipe from a store at `target`; False if it is not
    there. The recipe may leave values open: then the bundle has those that its builder chose."""
    key = bundle_key(checkpoint, recipe)
    with store.opened(key, target) as folder:
        if folder is None:
            return False
        try:
            bundle = Bundle(folder)
            bundle.verify()
        except CetaneError as error:
            store.refuse(result_path(key), error.message)
            return False
        own = bundle.manifest.model_copy(update=origins(checkpoint))
        write_json(folder / MANIFEST, own.model_dump(mode="json"))
        folder.rename(target)
    return True


def publish(
    store: Store, checkpoint: Checkpoint, recipe: Recipe, folder: Path, manifest: Manifest
) -> None:
    """Put a bundle into a store. It lies in `folder`, which has no manifest yet.

    `recipe` is the one that was asked for; its values may be open.
    """
    common = manifest.model_copy(update=NOWHERE)
    write_json(folder / MANIFEST, common.model_dump(mode="json"))
    files = manifest.files | records(folder, folder / MANIFEST)
    chosen = manifest.plan.recipe != recipe
    # A choice rests on sums, which differ with the number of threads: the first one stays.
    store.publish(bundle_key(checkpoint, recipe), folder, files, measured=chosen)


def origins(checkpoint: Checkpoint) -> dict[str, Any]:
    """Where a checkpoint and its adapters lie, as a manifest says it."""
    return {
        "source": location(checkpoint.source),
        "fingerprint": checkpoint.fingerprint,
        "lora": origin(checkpoint.merged[0]) if checkpoint.merged else None,
        "adapters": {name: origin(lora) for name, lora in checkpoint.adapters.items()},
    }


def location(source: str) -> str:
    """A local checkpoint's full path, so that gates find it from anywhere; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def origin(lora: Lora) -> AdapterSource:
    """Where an adapter came from."""
    return AdapterSource(source=location(str(lora.folder)), fingerprint=lora.fingerprint)
