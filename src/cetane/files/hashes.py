"""Hashes of files, of data and of code."""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.files.paths import inside
from cetane.files.reading import open_regular, too_large
from cetane.validation import Data

MOST_FILES = 1 << 14
"""The most files that one list names: each of them costs its reader two look-ups of a path."""
MOST_SPARSE = 1 << 30
"""The most bytes of a file that may be holes for the greater part. Its hash takes 0.6 s."""


def sha256(path: Path, most: int | None = None) -> str:
    """The hash of a regular file. Raises CetaneError if it cannot be read, has more than `most`
    bytes, or is large and sparse: a terabyte of holes takes no room, but twenty minutes."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if most is not None and size > most:
                raise too_large(path, most)
            if size > MOST_SPARSE and written(file.fileno(), size) < size // 2:
                raise CetaneError(
                    f"{path} has {size:,} bytes, and most of them were never written",
                    "download or copy it again",
                )
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error.strerror}") from error


def written(handle: int, size: int) -> int:
    """Bytes of an open file that are no holes, of `size` in all. Where a disk does not tell, all
    count."""
    count = stop = 0
    try:
        while stop < size:
            start = os.lseek(handle, stop, os.SEEK_DATA)
            stop = os.lseek(handle, start, os.SEEK_HOLE)
            count += stop - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # which means that only a hole follows
            return size
    finally:
        os.lseek(handle, 0, os.SEEK_SET)
    return count


def json_sha256(content: Any) -> str:
    """The hash of a JSON document, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@cache
def code_sha256(*folders: Path) -> str:
    """The hash of all Python code under some folders: a part of the keys of what this code made."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class FileRecord(Data):
    """The size and the hash that a file must have."""

    bytes: int
    sha256: str


def records(root: Path, folder: Path) -> dict[str, FileRecord]:
    """The records of all files under `folder` (or of `folder`, a file), by path from `root`."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        path.relative_to(root).as_posix(): FileRecord(
            bytes=path.stat().st_size, sha256=sha256(path)
        )
        for path in files
    }


def check_files(root: Path, files: Mapping[str, FileRecord], hint: str) -> None:
    """Raise CetaneError if a file is missing, or has another size or hash."""
    for name, record in files.items():
        path = inside(root, name)
        if not path.is_file():
            raise CetaneError(f"{root}: {name} is missing")
        if path.stat().st_size != record.bytes or sha256(path) != record.sha256:
            raise CetaneError(
                f"{root}: {name} is not the file that was built (its hash differs)", hint
            )
