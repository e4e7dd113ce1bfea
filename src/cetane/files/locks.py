"""Locks: one process at a time writes to a place."""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname

from cetane.errors import CetaneError
from cetane.files.reading import open_regular, read_bytes
from cetane.files.writing import disk_errors, remove, target_of
from cetane.validation import parse_json

OTHERWISE = "wait until it has ended, or choose another folder"
"""The advice to a second writer of a place that the user names."""
LARGEST_LOCK = 1000
"""Bytes of a lock's file."""


@contextmanager
def claimed(target: Path, job: str, otherwise: str = OTHERWISE) -> Iterator[None]:
    """A context in which no other process writes to `target`.

    The lock is `.NAME.lock` beside the target; its parent folders are made first. The system
    releases it when a process dies. filelock notices the removal of a lock file in use, so the last
    writer can remove it. What killed writers left beside the target (`.NAME.PROCESS.tmp`) is
    removed too. Raises CetaneError if there is another writer, with its process and `job` and with
    the hint `otherwise`, and for a target without a name, such as ".".
    """
    from filelock import FileLock, Timeout  # here: it loads asyncio, which readers do not need

    if target.name in ("", ".."):
        raise CetaneError(f"{target}: does not end with a name", "name a folder or a file in it")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        path = lock_of(target)
        if path.is_symlink():  # which filelock does not follow either
            raise CetaneError(f"cannot write {path}: it is a link", "move it away")
        lock = FileLock(path, timeout=0.2)
        try:
            lock.acquire()
        except Timeout as error:
            path.touch()  # filelock waits for a lock even where no file can be made
            raise CetaneError(
                f"{target} is being written by {holder(path)}",
                otherwise,
            ) from error
    try:
        with disk_errors(path):
            path.write_text(json.dumps({"process": os.getpid(), "host": gethostname(), "job": job}))
        remove_halves(target)
        yield
    finally:
        with suppress(OSError):  # the next writer takes a file that is left
            path.unlink(missing_ok=True)
        lock.release()


def remove_halves(target: Path) -> None:
    """Remove what killed writers of `target` left beside it. The caller has its lock."""
    for path in target.parent.glob(".*.tmp"):
        if target_of(path) == target:
            with suppress(OSError):  # another user's: it is in nobody's way
                remove(path)


def lock_of(target: Path) -> Path:
    """The lock of a target's writers."""
    return target.with_name(f".{target.name}.lock")


def is_claimed(target: Path) -> bool:
    """Whether a process of this machine writes to `target` now."""
    try:
        with open_regular(lock_of(target), follow=False) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file releases it
    except FileNotFoundError:
        return False
    except OSError:  # held, or nobody can tell
        return True
    return False


def holder(path: Path) -> str:
    """The holder of a lock, in words. A holder that is just starting is still unknown."""
    try:
        said = parse_json(read_bytes(path, LARGEST_LOCK), str(path))
        return f"process {said['process']} on {said['host']} ({said['job']})"
    except (CetaneError, KeyError, TypeError):
        return "another process"
