"""Ledgers: files of JSON lines that survive a crash and a power loss."""

import fcntl
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

from cetane.errors import CetaneError
from cetane.files import disk_errors, open_to_append, read_bytes
from cetane.validation import Data, parse_json, validated

Line = TypeVar("Line", bound=Data)
MOST_LINES = 1 << 17
"""The most lines: they are read in 4 s. A sweep of a hundred layers writes 10,000."""


class Ledger(Generic[Line]):
    """A file of JSON objects, one a line, appended and synced. It need not exist yet.

    A power loss can cut off the last line. `append` and `repair` set such a line aside in
    `NAME.broken`, and keep everything before it. A broken line elsewhere is an error.
    """

    def __init__(self, path: Path, kind: Any, hint: str) -> None:
        """Its lines are of a `kind`, which may be a union. `hint` is the advice in errors about a
        broken line."""
        self.path, self.kind, self.hint = path, kind, hint
        self.broken = path.with_name(path.name + ".broken")

    def read(self) -> list[Line]:
        """All lines in order, without a last line that was cut off. Changes nothing.

        Raises CetaneError for a line that is not of this ledger's kind, and for too many.
        """
        return self._parse(read_bytes(self.path))[0] if self.path.exists() else []

    def append(self, line: Line) -> None:
        """Add a line. Returns when it is on the disk."""
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as file:
                self._mend(file)
                file.write(line.model_dump_json().encode() + b"\n")
                sync(file)

    def repair(self) -> int:
        """Set aside a last line that was cut off. Returns its bytes; 0 if no line is broken."""
        if not self.path.exists():
            return 0
        if not self._lost(read_bytes(self.path)):
            return 0  # a read-only ledger can still be read
        with disk_errors(self.path), self._locked() as file:
            return self._mend(file)

    def _lost(self, content: bytes) -> bytes:
        return content[self._parse(content)[1] :]

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """A context with the file open for appending, locked against other processes."""
        new = not self.path.exists()
        with open_to_append(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                sync_folder(self.path.parent)
            yield file

    def _mend(self, file: BinaryIO) -> int:
        file.seek(0)
        content = file.read()
        lost = self._lost(content)
        if lost:
            with open_to_append(self.broken) as aside:
                aside.write(lost + b"\n")
                sync(aside)
            file.truncate(len(content) - len(lost))
            sync(file)
        elif content and not content.endswith(b"\n"):  # only the line's end was lost
            file.write(b"\n")
            sync(file)
        return len(lost)

    def _parse(self, content: bytes) -> tuple[list[Line], int]:
        """The lines, and the number of bytes that they take."""
        if content.count(b"\n") > MOST_LINES:
            raise CetaneError(
                f"{self.path} has more than {MOST_LINES:,} lines", "move it away to begin anew"
            )
        lines: list[Line] = []
        kept = 0
        texts = io.BytesIO(content).readlines()
        for number, text in enumerate(texts, 1):
            where = f"{self.path}: line {number}"
            try:
                value = parse_json(text, where)
            except CetaneError as error:
                if number == len(texts) and not text.endswith(b"\n"):
                    break
                raise CetaneError(error.message, self.hint) from error
            lines.append(validated(self.kind, value, where, self.hint))
            kept += len(text)
        return lines, kept


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync a folder: without it, a power loss can lose a new file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
