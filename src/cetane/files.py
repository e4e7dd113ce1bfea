"""Files: atomic writes, bounded reads, hashes, listings, locks and the cache folder.

A file is written whole or not at all, and nothing in a file is trusted before it is checked.
"""

import atexit
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from socket import gethostname
from typing import Any

import tomli_w

from cetane.errors import CetaneError
from cetane.validation import Content, Data, parse_json, parse_toml, validated

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the number of finished parts, and the number of all parts."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that is not shown."""


FULL = (os.strerror(errno.ENOSPC), "[MIL FileWriter]", "filesystem error: cannot copy")
"""Texts of coremltools' errors on a full disk. Its calls of shutil and its C++ lose the error
number."""
NATIVE = re.compile(r"\(os error ([0-9]{1,4})\)")
"""The error number in the text of Rust's errors, such as safetensors'."""


MOST_NAME_BYTES = 255
"""The most bytes of a name on the disks of Linux and macOS."""


def write_json(path: Path, content: Any) -> None:
    """Write JSON under a temporary name, then rename: a reader sees all of it or nothing."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


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
            raise CetaneError(f"disk full while writing {path}", hint) from error
        if isinstance(error, OSError) or code is not None:
            reason = os.strerror(code) if code else error
            raise CetaneError(f"cannot write {path}: {reason}") from error
        raise


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


def sha256(path: Path) -> str:
    """The hash of a regular file. Raises CetaneError if it cannot be read."""
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error}") from error


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


def nameable(path: str) -> bool:
    """Whether a path's names are printable, and short enough for the disks of Linux and macOS."""
    parts = path.split("/")
    return path.isprintable() and all(len(part.encode()) <= MOST_NAME_BYTES for part in parts)


def inside(root: Path, name: str) -> Path:
    """A path inside a folder, without links. Raises CetaneError for any other path."""
    if not nameable(name):
        raise CetaneError(f"{root}: no disk takes the name {name!r:.80}")
    parts = PurePosixPath(name)
    path = root / parts
    odd = parts.is_absolute() or ".." in parts.parts
    if odd or not (real := path.resolve()).is_relative_to(root.resolve()):
        raise CetaneError(f"{root}: the manifest points outside the bundle: {name}")
    if real != root.resolve() / parts:
        raise CetaneError(f"{root}: {name} is a link")
    return path


def check_outside(target: Path, folder: Path) -> None:
    """Raise CetaneError for a target inside a folder that must not change."""
    if folder.resolve() in target.resolve().parents:
        raise CetaneError(f"{target} is inside {folder}", "choose another place")


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


def cache_dir() -> Path:
    """`$CETANE_CACHE`, else `$XDG_CACHE_HOME/cetane`, else `~/.cache/cetane`. It may not exist."""
    if own := os.environ.get("CETANE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "cetane"
    return Path.home() / ".cache" / "cetane"


KERNELS, KERNELS_OF = "NUMBA_CACHE_DIR", "cetane-kernels-"
"""The variable that names numba's folder of compiled functions, which child processes inherit, and
what the names of cetane's own such folders begin with."""


def place_kernels(package: Path) -> None:
    """Let numba keep compiled functions in a folder of this version of the code, in the package.

    numba compiles a function again if the file of the function changes, but not if the file of a
    function that it calls changes. So callers would go on with an old kernel. Only functions of
    `mil/fast` call each other over files.

    If the package is read-only, the folder is in the cache folder. If that is read-only too, a
    folder of this process takes them: numba refuses to compile what it cannot keep anywhere. A
    user's own choice stays, and a parent's folder if its code is the same.
    """
    own, given = KERNELS_OF + code_sha256(package / "mil" / "fast")[:16], os.environ.get(KERNELS)
    if given and (not (name := Path(given).name).startswith(KERNELS_OF) or name.startswith(own)):
        return
    folder = package / "__pycache__" / own
    try:
        if os.access(package, os.W_OK):
            if not folder.is_dir():
                for other in folder.parent.glob(f"{KERNELS_OF}*"):
                    with suppress(OSError):  # another process removes it too
                        remove(other)
        else:
            folder = cache_dir() / "kernels" / own
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"{own}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[KERNELS] = str(folder)
    if "numba" in sys.modules:  # it has read the variable before
        sys.modules["numba"].config.CACHE_DIR = str(folder)


place_kernels(Path(__file__).parent)  # here: all modules with compiled functions need this one


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


LARGEST = 1 << 26
"""The largest file that is read whole, in bytes. A released checkpoint's index has up to 10 MB."""
LARGEST_TEXT = 1 << 28
"""The largest text to judge or to train on, in bytes: 60 M tokens."""
LARGEST_TOML = 1 << 18
"""Bytes of the largest TOML file. A recipe has up to 8 kB; tomllib takes 3 s for 1 MB."""


def open_regular(path: Path, follow: bool = True) -> BufferedReader:
    """A regular file, opened for reading.

    Raises OSError for devices, pipes and folders, which could block or never end. Raises it for a
    link too, unless `follow`.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    handle = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(handle, "rb")


def read_bytes(path: Path, most: int = LARGEST, follow: bool = True) -> bytes:
    """The content of a regular file of at most `most` bytes. Every file that is read whole comes
    through here.

    Raises CetaneError if it cannot be read, is larger, or is not a regular file. Files of untrusted
    folders, such as a bundle's, are opened with `follow=False`, which refuses links.
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
    """The UTF-8 text of `path`. Raises CetaneError as `read_bytes`."""
    try:
        return read_bytes(path, most, follow).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CetaneError(f"cannot read {path}: it is not UTF-8: {error}") from error


def read_json(path: Path, follow: bool = True, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `path`. Raises CetaneError if it cannot be read or is not an object; with
    `unique`, also for an object that has a key twice."""
    value = parse_json(read_bytes(path, follow=follow), str(path), unique=unique)
    if not isinstance(value, dict):
        raise CetaneError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_json_if_present(path: Path, follow: bool = True) -> dict[str, Any]:
    """As `read_json`, but empty if there is no such file."""
    return read_json(path, follow) if path.is_file() else {}


def read_named(kind: type[Content], path: Path, most: int, key: str, hint: str) -> Content:
    """Data of a kind from the JSON file that a recipe's `key` names, of at most `most` bytes.

    Raises CetaneError with the hint if the file holds none.
    """
    try:
        content = read_bytes(path, most)
    except CetaneError as error:
        raise CetaneError(f"{key}: {error.message}", hint) from error
    return validated(kind, parse_json(content, str(path), hint), str(path), hint)


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML table in `path`. Raises CetaneError if it cannot be read or is not TOML."""
    text = read_text(path, LARGEST_TOML).removeprefix("\ufeff")  # some editors begin a file so
    return parse_toml(text, str(path))


def write_toml(path: Path, content: Mapping[str, Any]) -> None:
    """Write TOML in one step."""
    with disk_errors(path), replacing(path) as temporary:
        temporary.write_text(tomli_w.dumps(content), encoding="utf-8")


def regular_files(root: Path) -> list[str]:
    """The paths, from `root`, of the files under it, sorted.

    Raises CetaneError unless all entries are regular files or folders: a link leads elsewhere, and
    a pipe blocks its reader.
    """
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


def read_exactly(path: Path, offset: int, nbytes: int) -> bytearray:
    """`nbytes` bytes of `path` from `offset`, in memory of their own.

    The caller must check the range against the file's size. Raises CetaneError if the file has
    become shorter since, or cannot be read.
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
    """The name, size in bytes and modification time in nanoseconds of `path`, for fingerprints."""
    try:
        status = path.stat()
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error}") from error
    return f"{path.name} {status.st_size} {status.st_mtime_ns}\n"


def content_identity(path: Path) -> str:
    """The name and the SHA-256 of `path`, for keys that machines share. The hash is kept in the
    cache folder as long as the file is the same."""
    status = file_identity(path) + str(path.stat().st_ino)
    known = cache_dir() / "hashes" / json_sha256([str(path.resolve()), status])
    try:
        digest = known.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        digest = ""
    if not re.fullmatch("[0-9a-f]{64}", digest):
        digest = sha256(path)
        write_cache(known, digest)
    return f"{path.name} {digest}\n"


@contextmanager
def claimed(target: Path, job: str) -> Iterator[None]:
    """A context in which no other process writes to `target`.

    The lock is `.NAME.lock` beside the target; its parent folders are made first. The system
    releases it when a process dies. filelock notices the removal of a lock file in use, so the last
    writer can remove it. Raises CetaneError if there is another writer, with its process and `job`,
    and for a target without a name, such as ".".
    """
    from filelock import FileLock, Timeout  # here: it loads asyncio, which readers do not need

    if target.name in ("", ".."):
        raise CetaneError(f"{target}: does not end with a name", "name a folder or a file in it")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        path = lock_of(target)
        lock = FileLock(path, timeout=0.2)
        try:
            lock.acquire()
        except Timeout as error:
            raise CetaneError(
                f"{target} is being written by {holder(path)}",
                "wait until it has ended, or choose another folder",
            ) from error
    try:
        with disk_errors(path):
            path.write_text(json.dumps({"process": os.getpid(), "host": gethostname(), "job": job}))
        yield
    finally:
        with suppress(OSError):  # the next writer takes a file that is left
            path.unlink(missing_ok=True)
        lock.release()


def lock_of(target: Path) -> Path:
    """The lock of a target's writers."""
    return target.with_name(f".{target.name}.lock")


def is_claimed(target: Path) -> bool:
    """Whether a process of this machine writes to `target` now."""
    try:
        with lock_of(target).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file releases it
    except FileNotFoundError:
        return False
    except OSError:  # held, or nobody can tell
        return True
    return False


def holder(path: Path) -> str:
    """The holder of a lock, in words. A holder that is just starting is still unknown."""
    try:
        said = json.loads(path.read_bytes()[:1000])
        return f"process {said['process']} on {said['host']} ({said['job']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def check_space(folder: Path, needed: int) -> None:
    """Raise CetaneError unless the disk of an existing folder has `needed` free bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise CetaneError(
            f"{folder}: {needed / 1e6:,.0f} MB are needed, but only {free / 1e6:,.0f} MB are free",
            "free some space, or choose another folder with --output",
        )
