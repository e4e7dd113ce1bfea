"""An unfinished bundle on the disk: what is done, and what it replaces."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.files import (
    PARTIAL,
    FileRecord,
    is_present,
    leads_elsewhere,
    read_bytes,
    records,
    remove,
    write_json,
)
from cetane.schema.draft_head import FOLDER
from cetane.validation import parse_json

log = logging.getLogger("cetane.build")


class Partial:
    """An unfinished bundle: what is done in `NAME.partial/bundle`, and a record of every part."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.root = target.with_name(target.name + PARTIAL)
        self.bundle = self.root / "bundle"
        self.done = self.root / "done"
        self.key = self.root / "key.json"
        self.store = self.root / "store"
        """Parts that workers have made, if there is no shared store."""
        self.earlier = self.root / "earlier"
        """The bundle that is being replaced, with its draft heads."""

    def start(self, key: str) -> None:
        """Keep what an interrupted build of the same key left, else start anew.

        CetaneError for a file or folder of this name that no build has left.
        """
        if not self.ours:
            raise CetaneError(
                f"{self.root} exists, and no build has left it",
                "move it away, or choose another --output",
            )
        self.resume()
        if read_note(self.key) != key:
            remove(self.root)
        for folder in (self.bundle / "shards", self.done):
            folder.mkdir(parents=True, exist_ok=True)
        for leftover in (*self.bundle.glob(".*"), *self.bundle.glob("shards/.*")):
            remove(leftover)
        write_json(self.key, key)

    @property
    def ours(self) -> bool:
        """Whether the folder is missing, or holds only what a killed build leaves at any step: no
        links among that."""
        if not is_present(self.root):
            return True
        if leads_elsewhere(self.root):
            return False
        known = {path.name for path in (self.bundle, self.done, self.key, self.store, self.earlier)}
        return all(p.name in known or p.name.startswith(".") for p in self.root.iterdir())

    def replace(self) -> None:
        """Move the finished bundle to its place, in two renames.

        A kill between them leaves both bundles in this folder, and `resume` puts the earlier one
        back.
        """
        if self.target.exists():
            self.target.rename(self.earlier)
        self.bundle.rename(self.target)
        self._forget_earlier()
        remove(self.root)

    def resume(self) -> None:
        """Put an earlier bundle back, or only its draft heads, if a kill ended `replace`."""
        if self.ours and self.earlier.exists():
            if self.target.exists():
                self._forget_earlier()
            else:
                self.earlier.rename(self.target)

    def _forget_earlier(self) -> None:
        """Remove the earlier bundle. Its draft heads move to a new bundle of the same content."""
        heads = self.earlier / FOLDER
        if heads.is_dir():
            if digest_of(self.earlier) == digest_of(self.target):
                heads.rename(self.target / FOLDER)
            else:
                log.warning(
                    "%s: the draft heads of the replaced bundle are removed, since its hidden "
                    "states were others (cetane train-head makes new ones)",
                    self.target,
                )
        remove(self.earlier)

    def record(self, name: str) -> dict[str, FileRecord]:
        """Note that a part is finished, with the hashes of its files, and return them."""
        made = records(self.bundle, self.bundle / name)
        write_json(self._note(name), dumped(made))
        return made

    def forget(self, names: list[str]) -> None:
        """Have parts made anew, by this build or by one that takes it up."""
        remove(self.store)
        for name in names:
            remove(self._note(name))

    def noted(self, names: list[str]) -> list[str]:
        """The parts that are there by their notes; `has` tells whether one is whole."""
        return [name for name in names if self._note(name).is_file()]

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
    """A record of a build; None if there is none that can be read: a crash left something else."""
    with suppress(CetaneError):
        return parse_json(read_bytes(path), str(path))
    return None


def digest_of(bundle: Path) -> str | None:
    """The digest of a bundle; None if a kill has removed a part of it."""
    with suppress(CetaneError):
        return Bundle(bundle).digest
    return None
