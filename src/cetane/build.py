"""Checkpoint and recipe to bundle, shard by shard; a build that was stopped goes on."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def build(
    checkpoint: Checkpoint, recipe: Recipe, target: Path, progress: Progress, force: bool = False
) -> Bundle:
    """Build a bundle at `target`; a finished one of the same checkpoint and recipe is kept.

    Raises CetaneError when `target` holds something else, unless `force`.
    """
    planner = Planner(checkpoint, recipe)
    partial = Partial(target)
    if target.exists():
        if not force:
            return existing(target, recipe, checkpoint)
        if not (target / MANIFEST).is_file():
            raise CetaneError(f"{target} is not a bundle, so --force does not replace it")
    with disk_errors(partial.bundle):
        partial.start(build_key(checkpoint, recipe))
        jobs = parts(planner, checkpoint)
        for done, (name, make) in enumerate(jobs.items()):
            progress(name, done, len(jobs))
            if not partial.has(name):
                with replacing(partial.bundle / name) as temporary:
                    make(temporary)
                partial.record(name)
        progress("manifest", len(jobs), len(jobs))
        manifest = Manifest(
            producer=producers(),
            source=location(checkpoint.source),
            fingerprint=checkpoint.fingerprint,
            plan=planner.plan(),
            files=partial.files(),
        )
        write_json(partial.bundle / MANIFEST, manifest.model_dump(mode="json"))
        remove(target)
        partial.bundle.rename(target)
        remove(partial.root)
    return Bundle(target)


class Partial:
    """An unfinished bundle: what is done in `NAME.partial/bundle`, and a record of every part."""

    def __init__(self, target: Path) -> None:
        self.root = target.with_name(target.name + ".partial")
        self.bundle = self.root / "bundle"
        self.done = self.root / "done"
        self.key = self.root / "key.json"

    def start(self, key: str) -> None:
        """Keep what an interrupted build of the same key left, else start anew."""
        if read_note(self.key) != key:
            remove(self.root)
        for folder in (self.bundle / "shards", self.done):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.bundle.glob(".*"), *self.bundle.glob("shards/.*")):
            remove(leftover)
        write_json(self.key, key)

    def record(self, name: str) -> None:
        """Note that a part is finished, with the hashes of its files."""
        write_json(self._note(name), dumped(records(self.bundle, self.bundle / name)))

    def has(self, name: str) -> bool:
        """Whether a part is there, whole and as recorded."""
        made = records(self.bundle, self.bundle / name)
        return bool(made) and read_note(self._note(name)) == dumped(made)

    def files(self) -> dict[str, FileRecord]:
        """The records of all parts."""
        notes = [read_note(path) for path in sorted(self.done.glob("*.json"))]
        return {path: FileRecord(**record) for note in notes for path, record in note.items()}

    def _note(self, name: str) -> Path:
        return self.done / (name.replace("/", "-") + ".json")


def dumped(made: dict[str, FileRecord]) -> dict[str, Any]:
    return {path: record.model_dump() for path, record in made.items()}


def read_note(path: Path) -> Any:
    """A record of ours; None when there is none, or a crash left something else."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return None


def location(source: str) -> str:
    """A local checkpoint's full path, so that gates find it from anywhere; a hub id as it is."""
    return str(Path(source).resolve()) if Path(source).exists() else source


def existing(target: Path, recipe: Recipe, checkpoint: Checkpoint) -> Bundle:
    """A finished bundle of the same recipe and checkpoint; CetaneError if it is another."""
    bundle = Bundle(target)
    if bundle.plan.recipe != recipe or bundle.manifest.fingerprint != checkpoint.fingerprint:
        raise CetaneError(
            f"{target} is a bundle of another checkpoint or recipe", "--force replaces it"
        )
    bundle.verify()
    remove(Partial(target).root)  # left by a kill between the last two steps of a build
    return bundle


def build_key(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """What a partial build is a build of."""
    content = [checkpoint.fingerprint, recipe.model_dump(mode="json"), producers()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
