"""Files of the cache folder, which are used only as they were written."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.files.hashes import sha256
from cetane.files.reading import read_text
from cetane.files.writing import disk_errors, remove, replacing

DIGITS = 64
"""The digits of a SHA-256."""


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


@contextmanager
def keeping(path: Path) -> Iterator[Path]:
    """A context with a temporary path, whose file is kept as `path`, its hash beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        yield temporary
        digest = sha256(temporary)
    with replacing(hash_of(path)) as temporary:
        temporary.write_text(digest, encoding="ascii")


def is_kept(path: Path) -> bool:
    """Whether a file is as `keeping` wrote it. If not, it is missing, changed or damaged, and is to
    be made again."""
    with suppress(CetaneError):
        return read_text(hash_of(path), DIGITS) == sha256(path)
    return False


def hash_of(path: Path) -> Path:
    """The file that holds the hash of a kept file."""
    return path.with_name(f"{path.name}.sha256")


def keep_text(path: Path, text: str) -> None:
    """Keep a text. Raises CetaneError if it cannot be written."""
    with disk_errors(path), keeping(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_cache(path: Path, text: str) -> None:
    """Keep a text. It is no error if the cache cannot be written."""
    with suppress(OSError, CetaneError):
        keep_text(path, text)


def read_cache(path: Path) -> str | None:
    """A text that is as `write_cache` wrote it; else None."""
    with suppress(CetaneError):
        return read_text(path) if is_kept(path) else None
    return None


def keep_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Keep torch tensors by name. Raises OSError or SafetensorError if they cannot be written."""
    from safetensors.torch import save_file  # here: most readers of the cache need no torch

    with keeping(path) as temporary:
        save_file(tensors, temporary)


def kept_tensors(path: Path) -> dict[str, Any] | None:
    """Tensors that are as `keep_tensors` wrote them; else None."""
    from safetensors.torch import load_file

    with suppress(OSError):  # another process removes it
        return load_file(path) if is_kept(path) else None
    return None
