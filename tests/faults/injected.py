"""Faults at a file system's changes: a kill, a full disk, an I/O error, at the n-th of them.

Python reports every open, rename, removal and new folder to audit hooks (PEP 578) before it does
them, also those of shutil and pathlib. So a fault lies exactly before the n-th change of a folder,
whatever the time. `os.fsync` has no such report and is wrapped.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

Fault = Literal["kill", "full", "broken"]
FAULTS: tuple[Fault, ...] = ("kill", "full", "broken")
KILLED = 99
"""Exit code of a process that was killed at its change."""

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
GROWS = {"open", "os.mkdir", "os.rename", "fsync"}
"""Changes that a full disk refuses; it still lets files be removed."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Watch:
    """Counts changes below some folders, and fails at one of them."""

    def __init__(self) -> None:
        self.on = False
        self.count = 0
        self.act: Callable[[int, str], None] = lambda number, event: None
        self.folders: tuple[str, ...] = ()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, mode, flags = args
            writing = isinstance(flags, int) and flags & WRITES
            if not writing or (isinstance(mode, str) and not set(mode) & set("wax+")):
                return
        elif event not in CHANGES:
            return
        else:
            path = args[0]
        self.changed(event, path)

    def changed(self, event: str, path: Any) -> None:
        if isinstance(path, bytes | os.PathLike):
            path = os.fsdecode(path)
        if isinstance(path, str) and os.path.abspath(path).startswith(self.folders):
            self.count += 1
            self.act(self.count, event)


WATCH = Watch()
sys.addaudithook(WATCH)


@contextmanager
def watched(folders: tuple[Path, ...], act: Callable[[int, str], None]) -> Iterator[Watch]:
    """Call `act` with number and name of every change below the folders, before it is done."""
    fsync = os.fsync

    def synced(handle: Any) -> None:
        WATCH.changed("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    WATCH.folders, WATCH.act, WATCH.count, WATCH.on = tuple(map(str, folders)), act, 0, True
    os.fsync = synced
    try:
        yield WATCH
    finally:
        WATCH.on = False
        os.fsync = fsync


def changes(folders: tuple[Path, ...], job: Callable[[], object]) -> int:
    """How many changes a job makes."""
    with watched(folders, lambda number, event: None) as watch:
        job()
    return watch.count


def hit(folders: tuple[Path, ...], job: Callable[[], object], fault: Fault, at: int) -> int:
    """Run a job in a process of its own with a fault at the change number `at`; its exit code:
    KILLED, 2 for an error that the job reported, 0 where it ended well, 1 for any other error.

    A kill ends the process at once: no handler, no `finally`. A full disk refuses all that grows
    from then on, a broken one refuses one change.
    """

    def act(number: int, event: str) -> None:
        if fault == "kill" and number == at:
            os._exit(KILLED)
        if fault == "full" and number >= at and event in GROWS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if fault == "broken" and number == at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        from cetane.errors import CetaneError

        try:
            with watched(folders, act):
                job()
        except CetaneError:
            os._exit(2)
        os._exit(0)
    except BaseException:
        import traceback

        WATCH.on = False
        traceback.print_exc()
        os._exit(1)
