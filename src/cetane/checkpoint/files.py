"""Reading files that may be missing, cut short or malformed."""

import json
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`; CetaneError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CetaneError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; CetaneError when it cannot be read or is something else."""
    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CetaneError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CetaneError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`, and empty when there is no such file."""
    return read_json(path) if path.is_file() else {}


def read_exactly(path: Path, offset: int, nbytes: int) -> bytearray:
    """`nbytes` bytes of `path` from `offset`, in memory of their own (no mapping is kept).

    The caller has checked the range against the file's size; CetaneError when the file has become
    shorter since, or cannot be read.
    """
    buffer = bytearray(nbytes)
    try:
        with path.open("rb") as file:
            file.seek(offset)
            count = file.readinto(buffer)
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error}") from error
    if count != nbytes:
        raise CetaneError(f"{path} became shorter while it was open", "download or copy it again")
    return buffer


def file_identity(path: Path) -> str:
    """Name, size in bytes and modification time in nanoseconds of `path`, for fingerprints."""
    try:
        status = path.stat()
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error}") from error
    return f"{path.name} {status.st_size} {status.st_mtime_ns}\n"
