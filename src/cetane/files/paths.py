"""Paths that a manifest may name, places that must not change, and the cache folder."""

import os
from pathlib import Path, PurePosixPath

from cetane.errors import CetaneError

PARTIAL = ".partial"
"""The end of the name of a folder that is not finished yet."""
MOST_NAME_BYTES = 255
"""The most bytes of a name on the disks of Linux and macOS."""


def cache_dir() -> Path:
    """`$CETANE_CACHE`, else `$XDG_CACHE_HOME/cetane`, else `~/.cache/cetane`. It may not exist.

    Raises CetaneError if that is in a home folder, and none is known."""
    if own := os.environ.get("CETANE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "cetane"
    return home() / ".cache" / "cetane"


def home() -> Path:
    """The user's home folder. Raises CetaneError if none is known, as in some containers."""
    try:
        return Path.home()
    except RuntimeError as error:
        raise CetaneError(
            "the system knows no home folder of this user",
            "set HOME, or set CETANE_CACHE to a folder for the cache",
        ) from error


def nameable(path: str) -> bool:
    """Whether a path's names are printable, and short enough for the disks of Linux and macOS."""
    parts = path.split("/")
    return path.isprintable() and all(len(part.encode()) <= MOST_NAME_BYTES for part in parts)


def is_file(path: Path) -> bool:
    """Whether a file is at a path. Raises CetaneError if the system cannot tell: for too long a
    name, and in a folder that this user may not search."""
    try:
        return path.is_file()
    except OSError as error:
        raise CetaneError(f"cannot look at {path!s:.200}: {error.strerror}") from error


def inside(root: Path, name: str) -> Path:
    """A path inside a folder, without links. Raises CetaneError for any other path."""
    if not nameable(name):
        raise CetaneError(f"{root}: no disk takes the name {name!r:.80}")
    parts = PurePosixPath(name)
    path = root / parts
    odd = parts.is_absolute() or ".." in parts.parts
    try:
        real = path.resolve()
    except (OSError, RuntimeError):  # links that lead to each other
        raise CetaneError(f"{root}: {name} is a link") from None
    if odd or not real.is_relative_to(root.resolve()):
        raise CetaneError(f"{root}: the manifest points outside the bundle: {name}")
    if real != root.resolve() / parts:
        raise CetaneError(f"{root}: {name} is a link")
    return path


def check_outside(target: Path, folder: Path) -> None:
    """Raise CetaneError for a target inside a folder that must not change."""
    if folder.resolve() in target.resolve().parents:
        raise CetaneError(f"{target} is inside {folder}", "choose another place")
