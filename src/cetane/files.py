"""Files as cetane reads, writes and lists them: whole or not at all, and never believed unseen."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import Any

from filelock import FileLock, Timeout

from cetane.errors import CetaneError
from cetane.validation import Data

Progress = Callable[[str, int, int], None]
"""Called with what is being made, how many parts are done, and how many there are."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


FULL = (os.strerror(errno.ENOSPC), "[MIL FileWriter]", "filesystem error: cannot copy")
"""What coremltools says on a full disk: it loses the error number, in shutil and in C++."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader sees all of it or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that takes the place of `path` when the block ends well."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)
    try:
        yield temporary
        if temporary.is_dir():  # a folder does not replace one that holds something
            remove(path)
        os.replace(temporary, path)
    finally:
        remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk, and whatever else the file system refuses, into a CetaneError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        code = error.errno if isinstance(error, OSError) else None
        if code == errno.ENOSPC or any(text in str(error) for text in FULL):
            hint = f"free some space there and in {tempfile.gettempdir()}, then run it again"
            raise CetaneError(f"disk full while writing {path}", f"{hint}: it resumes") from error
        if isinstance(error, OSError):
            raise CetaneError(f"cannot write {path}: {error}") from error
        raise


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


def cache_dir() -> Path:
    """`$CETANE_CACHE`, else `$XDG_CACHE_HOME/cetane`, else `~/.cache/cetane`; may not exist yet."""
    if own := os.environ.get("CETANE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "cetane"
    return Path.home() / ".cache" / "cetane"


def write_cache(path: Path, text: str) -> None:
    """Put `text` at `path` in one step; a cache that cannot be written is no error."""
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


@contextmanager
def claimed(target: Path, job: str) -> Iterator[None]:
    """Keep every other writer away from `target` while the block runs.

    The lock is `.NAME.lock` beside the target, whose parent folders are made first. The system
    releases it when a process dies. filelock notices a lock file that was removed under it, so
    the last writer can take the file away.
    Raises CetaneError, which names the other writer's process and `job`, when there is one.
    """
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        path = target.with_name(f".{target.name}.lock")
        lock = FileLock(path, timeout=0.2)
        try:
            lock.acquire()
        except Timeout as error:
            raise CetaneError(
                f"{target} is being written by {holder(path)}",
                "wait until it has ended, or choose another place",
            ) from error
    try:
        path.write_text(json.dumps({"process": os.getpid(), "host": gethostname(), "job": job}))
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


def holder(path: Path) -> str:
    """Who holds a lock, in words; a holder that is just starting has not said so yet."""
    try:
        said = json.loads(path.read_bytes()[:1000])
        return f"process {said['process']} on {said['host']} ({said['job']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def check_space(folder: Path, needed: int) -> None:
    """CetaneError unless the disk of `folder`, which exists, has `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CetaneError(
            f"{folder}: {needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free",
            "free some space, or choose another place with --output",
        )
