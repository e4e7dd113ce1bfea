"""Files as cetane reads, writes and lists them: whole or not at all, and never believed unseen."""

import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import Any, BinaryIO, Generic, TypeVar

import tomli_w
from pydantic import TypeAdapter

from cetane.errors import CetaneError
from cetane.validation import Data, parse_json, parse_toml, validated

Line = TypeVar("Line")
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
            raise CetaneError(f"cannot write {path}: {error.strerror or error}") from error
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
    """Of a regular file; CetaneError when it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error}") from error


def inside(root: Path, name: str) -> Path:
    """A path inside a folder, without links; CetaneError for any other."""
    parts = PurePosixPath(name)
    path = root / parts
    odd = parts.is_absolute() or ".." in parts.parts or "\0" in name
    if odd or not (real := path.resolve()).is_relative_to(root.resolve()):
        raise CetaneError(f"{root}: the manifest points outside the bundle: {name}")
    if real != root.resolve() / parts:
        raise CetaneError(f"{root}: {name} is a link")
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


LARGEST = 1 << 26
"""Bytes of a file that is read whole; the largest index of a released checkpoint has 10 MB."""
LARGEST_TOML = 1 << 18
"""The largest recipe has 8 kB; tomllib takes 3 s for 1 MB."""


def open_regular(path: Path, follow: bool = True) -> BufferedReader:
    """A regular file, opened for reading; OSError for a link, unless `follow`, and for devices,
    pipes and folders, which could block or never end."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def read_bytes(path: Path, most: int = LARGEST, follow: bool = True) -> bytes:
    """All of a regular file of at most `most` bytes: the door for every file that is read whole.

    CetaneError when it cannot be read, is larger, or is no regular file. Files that a stranger
    may have laid out (a bundle's) are opened with `follow=False`: a link is refused.
    """
    try:
        with open_regular(path, follow) as file:
            content = file.read(most + 1)
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise CetaneError(f"cannot read {path}: {'it is a link' if link else error}") from error
    if len(content) > most:
        raise CetaneError(f"{path} is larger than the {most:,} bytes that such a file may have")
    return content


def read_text(path: Path, most: int = LARGEST, follow: bool = True) -> str:
    """The UTF-8 text of `path`; CetaneError as `read_bytes`."""
    try:
        return read_bytes(path, most, follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CetaneError(f"cannot read {path}: it is not UTF-8: {error}") from error


def read_json(path: Path, follow: bool = True) -> dict[str, Any]:
    """The JSON object in `path`; CetaneError when it cannot be read or is something else."""
    value = parse_json(read_bytes(path, follow=follow), str(path))
    if not isinstance(value, dict):
        raise CetaneError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_json_if_present(path: Path, follow: bool = True) -> dict[str, Any]:
    """As `read_json`, and empty when there is no such file."""
    return read_json(path, follow) if path.is_file() else {}


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML table in `path`; CetaneError when it cannot be read or is something else."""
    return parse_toml(read_text(path, LARGEST_TOML), str(path))


def write_toml(path: Path, content: Mapping[str, Any]) -> None:
    """Write TOML in one step."""
    with disk_errors(path), replacing(path) as temporary:
        temporary.write_text(tomli_w.dumps(content), encoding="utf-8")


def regular_files(root: Path) -> list[str]:
    """Paths, from `root`, of the files under it, sorted; CetaneError unless everything there is a
    regular file or a folder: a link shows what is elsewhere, and a pipe blocks its reader."""
    names, folders = [], [root]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            raise CetaneError(f"cannot read {folder}: {error.strerror}") from error
        for entry in entries:
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                names.append(path.relative_to(root).as_posix())
            else:
                kind = "a link" if entry.is_symlink() else "neither a file nor a folder"
                raise CetaneError(f"{root}: {path.relative_to(root)} is {kind}")
    return sorted(names)


class Ledger(Generic[Line]):
    """A file of one JSON object a line, appended and synced; it need not exist yet.

    A power loss can cut the last line off. `append` and `repair` set such a line aside in
    `NAME.broken`, and everything before it stays. A broken line elsewhere is an error.
    """

    def __init__(self, path: Path, kind: TypeAdapter[Line], hint: str) -> None:
        """Lines of a `kind`; `hint` is what an error about a broken line suggests."""
        self.path, self.kind, self.hint = path, kind, hint
        self.broken = path.with_name(path.name + ".broken")

    def read(self) -> list[Line]:
        """All lines in order, without a last one that was cut off; CetaneError for one that is
        no line of this ledger. Changes nothing."""
        return self._parse(read_bytes(self.path))[0] if self.path.exists() else []

    def append(self, line: Line) -> None:
        """Add a line, and return when it is on the disk."""
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked() as file:
                self._mend(file)
                file.write(self.kind.dump_json(line) + b"\n")
                sync(file)

    def repair(self) -> int:
        """Set a last line that was cut off aside; returns its bytes, 0 if nothing is broken."""
        if not self.path.exists():
            return 0
        if not self._lost(read_bytes(self.path)):
            return 0  # a ledger that may not be written can still be read
        with disk_errors(self.path), self._locked() as file:
            return self._mend(file)

    def _lost(self, content: bytes) -> bytes:
        return content[self._parse(content)[1] :]

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file for appending, while no other process does."""
        new = not self.path.exists()
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                sync_folder(self.path.parent)
            yield file

    def _mend(self, file: BinaryIO) -> int:
        file.seek(0)
        content = file.read()
        lost = self._lost(content)
        if lost:
            with self.broken.open("ab") as aside:
                aside.write(lost + b"\n")
                sync(aside)
            file.truncate(len(content) - len(lost))
            sync(file)
        elif content and not content.endswith(b"\n"):  # only the line's end was lost
            file.write(b"\n")
            sync(file)
        return len(lost)

    def _parse(self, content: bytes) -> tuple[list[Line], int]:
        """The lines, and how many bytes they take."""
        lines: list[Line] = []
        kept = 0
        texts = io.BytesIO(content).readlines()
        for number, text in enumerate(texts, 1):
            where = f"{self.path}: line {number} is broken"
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
    """A new file is there after a power loss only if its folder knows."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_exactly(path: Path, offset: int, nbytes: int) -> bytearray:
    """`nbytes` bytes of `path` from `offset`, in memory of their own (no mapping is kept).

    The caller has checked the range against the file's size; CetaneError when the file has become
    shorter since, or cannot be read.
    """
    buffer = bytearray(nbytes)
    try:
        with open_regular(path) as file:
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
    from filelock import FileLock, Timeout  # here: it loads asyncio, which readers do not need

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
