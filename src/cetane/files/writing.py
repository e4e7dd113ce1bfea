"""Writes in one step: a reader sees the whole file or nothing. Errors of disks, in words."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from math import ceil, floor
from pathlib import Path
from typing import Any

import tomli_w

from cetane.errors import CetaneError
from cetane.files.paths import cache_dir
from cetane.files.reading import is_present

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Error numbers of a place that this process may only read."""
FULL = (os.strerror(errno.ENOSPC), "[MIL FileWriter]", "filesystem error: cannot copy")
"""Texts of coremltools' errors on a full disk. Its calls of shutil and its C++ lose the error
number."""
MOVE_CACHE = "set CETANE_CACHE to another folder"
"""The advice where the cache folder takes no files."""
NATIVE = re.compile(r"\(os error ([0-9]{1,4})\)")
"""The error number in the text of Rust's errors, such as safetensors'."""

TEMPORARY = re.compile(r"\.(.+)\.[0-9]+(?:-\w+)?\.tmp")
"""The names of temporary files: the target's, the id of the process that writes it, and perhaps
letters that keep its threads apart."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context with a temporary path, which replaces `path` if the block succeeds."""
    # The process id keeps two processes from writing to one temporary file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    remove(temporary)
    try:
        yield temporary
        if temporary.is_dir():  # a folder cannot replace a folder that is not empty
            remove(path)
        os.replace(temporary, path)
    finally:
        remove(temporary)


def target_of(path: Path) -> Path | None:
    """The path that a temporary path was to replace or to become; None for any other path."""
    made = TEMPORARY.fullmatch(path.name)
    return made and path.with_name(made[1])


def remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A context that turns a full disk, and other errors of the file system, into CetaneErrors."""
    try:
        yield
    except CetaneError:
        raise
    except Exception as error:  # libraries in C++ and Rust raise errors of their own
        native = NATIVE.search(str(error))
        code = error.errno if isinstance(error, OSError) else int(native[1]) if native else None
        if code == errno.ENOSPC or any(text in str(error) for text in FULL):
            hint = f"free some space there and in {tempfile.gettempdir()}, then run it again"
            hint += f"; or {MOVE_CACHE}" if in_cache(path) else ""
            raise CetaneError(f"disk full while writing {path}", hint) from error
        if isinstance(error, OSError) or code is not None:
            reason = os.strerror(code) if code else error
            which = "a folder that you may write to" if code in READ_ONLY else "another folder"
            advice = MOVE_CACHE if in_cache(path) else f"choose {which}"
            raise CetaneError(f"cannot write {path}: {reason}", advice) from error
        raise


def in_cache(path: Path) -> bool:
    """Whether a path is in the cache folder: it is cetane's choice, not the user's."""
    with suppress(CetaneError):  # no cache folder is known
        return path.is_relative_to(cache_dir())
    return False


def check_writable(path: Path) -> None:
    """Raise CetaneError unless the folder of a file to come takes files, or can be made. It makes
    none: that is for work that should not be lost at its end, and may fail before."""
    with disk_errors(path):
        folder = next(folder for folder in path.absolute().parents if is_present(folder))
        tempfile.TemporaryFile(dir=folder).close()


def make_folder_of(path: Path) -> None:
    """Make the folder of a file to come. CetaneError if the disk refuses it."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader sees all of it or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8, in one step. CetaneError if the disk does not take it."""
    with disk_errors(path), replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_toml(path: Path, content: Mapping[str, Any]) -> None:
    """Write TOML as `write_text` does."""
    write_text(path, tomli_w.dumps(content))


def check_space(folder: Path, needed: int) -> None:
    """Raise CetaneError unless the disk of an existing folder has `needed` free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        most, least = ceil(needed / 1e6), floor(free / 1e6)  # rounded so that they always differ
        raise CetaneError(
            f"{folder}: {most:,} MB are needed, but only {least:,} MB are free",
            "free some space, or choose another folder with --output",
        )
