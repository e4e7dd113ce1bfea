"""Checkpoint and recipe to bundle, shard by shard; a build that was stopped goes on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cetane.bundle import (
    EMBEDDING,
    MANIFEST,
    TOKENIZER,
    Bundle,
    FileRecord,
    Manifest,
    disk_errors,
    producers,
    records,
    remove,
    replacing,
    rotary_path,
    shard_path,
    write_json,
)
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.families.base import check_finite
from cetane.lower.lower import lower_shard
from cetane.plan import Planner
from cetane.recipe import Recipe

Progress = Callable[[str, int, int], None]
"""Called with what is being made, how many parts are done, and how many there are."""

KEY = ".build.json"
DONE = ".done"


def build(
    checkpoint: Checkpoint, recipe: Recipe, target: Path, progress: Progress, force: bool = False
) -> Bundle:
    """Build a bundle at `target`; a finished one of the same checkpoint and recipe is kept.

    Raises CetaneError when `target` holds something else, unless `force`.
    """
    planner = Planner(checkpoint, recipe)
    key = build_key(checkpoint, recipe)
    if target.exists():
        if not force:
            return existing(target, recipe, checkpoint)
        remove(target)
    partial = target.with_name(target.name + ".partial")
    with disk_errors(partial):
        start(partial, key)
        jobs = parts(planner, checkpoint)
        for done, (name, make) in enumerate(jobs.items()):
            progress(name, done, len(jobs))
            if not finished(partial, name):
                with replacing(partial / name) as temporary:
                    make(temporary)
                finish(partial, name)
        progress("manifest", len(jobs), len(jobs))
        manifest = Manifest(
            producer=producers(), source=checkpoint.source, plan=planner.plan(),
            files=files(partial),
        )  # fmt: skip
        remove(partial / DONE)
        remove(partial / KEY)
        write_json(partial / MANIFEST, manifest.model_dump(mode="json"))
        partial.rename(target)
    return Bundle(target)


def existing(target: Path, recipe: Recipe, checkpoint: Checkpoint) -> Bundle:
    """A finished bundle of the same recipe and checkpoint; CetaneError if it is another."""
    bundle = Bundle(target)
    if bundle.plan.recipe != recipe or bundle.manifest.source != checkpoint.source:
        raise CetaneError(
            f"{target} is a bundle of another checkpoint or recipe", "--force replaces it"
        )
    bundle.verify()
    return bundle


def build_key(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """What a partial build is a build of."""
    content = [checkpoint.fingerprint, recipe.model_dump(mode="json"), producers()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def start(partial: Path, key: str) -> None:
    """Prepare the folder: keep what an interrupted build of the same key left, else start anew."""
    record = partial / KEY
    if not record.is_file() or json.loads(record.read_bytes()) != {"key": key}:
        remove(partial)
    for folder in (partial / "shards", partial / DONE):
        folder.mkdir(parents=True, exist_ok=True)
    for leftover in (partial / "shards").glob(".*"):
        remove(leftover)
    write_json(record, {"key": key})


def parts(planner: Planner, checkpoint: Checkpoint) -> dict[str, Callable[[Path], None]]:
    """What a bundle is made of: path -> how to write it."""

    def embedding(path: Path) -> None:
        name = planner.model.embedding
        table = checkpoint.read(name).float()
        check_finite(name, table)
        with path.open("wb") as file:
            np.save(file, table.numpy().astype(np.float16))

    def rotary(table: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            rows = planner.model.rotary[table].cos_sin(planner.recipe.cache.context)
            with path.open("wb") as file:
                np.save(file, rows.numpy())

        return write

    def tokenizer(path: Path) -> None:
        path.mkdir()
        checkpoint.tokenizer.save(path)

    def shard(name: str) -> Callable[[Path], None]:
        return lambda path: lower_shard(planner, checkpoint, name, path)

    return (
        {EMBEDDING: embedding, TOKENIZER: tokenizer}
        | {rotary_path(table): rotary(table) for table in planner.model.rotary}
        | {shard_path(name): shard(name) for name in planner.members}
    )


def done_record(partial: Path, name: str) -> Path:
    return partial / DONE / (name.replace("/", "-") + ".json")


def finish(partial: Path, name: str) -> None:
    """Record the hashes of a finished part."""
    made = records(partial, partial / name)
    write_json(done_record(partial, name), {path: r.model_dump() for path, r in made.items()})


def finished(partial: Path, name: str) -> bool:
    """Whether a part is there, whole and as recorded."""
    record = done_record(partial, name)
    if not record.is_file():
        return False
    expected = {path: FileRecord(**r) for path, r in json.loads(record.read_bytes()).items()}
    return records(partial, partial / name) == expected if (partial / name).exists() else False


def files(partial: Path) -> dict[str, FileRecord]:
    """The records of all parts, from what was recorded when each was finished."""
    made = {}
    for record in sorted((partial / DONE).glob("*.json")):
        made.update({p: FileRecord(**r) for p, r in json.loads(record.read_bytes()).items()})
    return made
