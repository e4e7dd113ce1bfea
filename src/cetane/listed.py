"""Files of a folder that a manifest lists, each with its size and hash: no other is believed."""

import hashlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from cetane.errors import CetaneError
from cetane.families.flow import Data


class FileRecord(Data):
    """What a file must be."""

    bytes: int
    sha256: str


def records(root: Path, folder: Path) -> dict[str, FileRecord]:
    """What the files under `folder`, or `folder` itself as a file, are now; by path from `root`."""
    files = [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.is_file())
    return {
        path.relative_to(root).as_posix(): FileRecord(
            bytes=path.stat().st_size, sha256=sha256(path)
        )
        for path in files
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inside(root: Path, name: str) -> Path:
    """A path inside a folder; CetaneError for any that is not."""
    parts = PurePosixPath(name)
    path = root / parts
    odd = parts.is_absolute() or ".." in parts.parts or "\0" in name
    if odd or not path.resolve().is_relative_to(root.resolve()):
        raise CetaneError(f"{root}: the manifest points outside the bundle: {name}")
    return path


def check_files(root: Path, files: Mapping[str, FileRecord], hint: str) -> None:
    """CetaneError if a file is missing or is not what it should be."""
    for name, record in files.items():
        path = inside(root, name)
        if not path.is_file():
            raise CetaneError(f"{root}: {name} is missing")
        if path.stat().st_size != record.bytes or sha256(path) != record.sha256:
            raise CetaneError(
                f"{root}: {name} is not the file that was built (its hash differs)", hint
            )
