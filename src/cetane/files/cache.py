"""The cache folder."""

import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files.writing import remove


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


def forget_oldest(items: Iterable[Path], largest: int, keep: Path | None = None) -> None:
    """Remove the files or folders that were used longest ago, until the rest has at most `largest`
    bytes. `keep` stays. It is no error if one cannot be removed, or is gone."""
    found = []
    for item in items:
        with suppress(FileNotFoundError):  # another process writes and forgets at the same time
            files = item.iterdir() if item.is_dir() else [item]
            found.append((item.stat().st_mtime, sum(file.stat().st_size for file in files), item))
    total = 0
    for _, size, item in sorted(found, reverse=True):
        total += size
        if total > largest and item != keep:
            with suppress(OSError):
                remove(item)


def write_cache(path: Path, text: str) -> None:
    """Write `text` to `path` in one step. It is no error if the cache cannot be written."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".", delete=False
        ) as file:
            temporary = Path(file.name)
            try:
                file.write(text)
                file.close()
                temporary.replace(path)
            except OSError:
                temporary.unlink(missing_ok=True)
