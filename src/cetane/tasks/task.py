"""A task: a piece of work, named by a hash of everything that its result depends on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from socket import gethostname
from tempfile import TemporaryDirectory

import cetane
from cetane.errors import CetaneError
from cetane.files import code_sha256, json_sha256, records, sha256
from cetane.store.places import Folder
from cetane.store.settings import using
from cetane.store.store import Store
from cetane.threads import threads

BESIDE = ("docs", "experiments", "recipes")
"""Folders that a wheel holds beside the code, and a checkout at its top. A task's key has what it
takes of a recipe."""

BASE_MEMORY = 1_500_000_000
"""Bytes of a process without weights: torch, and either coremltools and a small graph, or the
results on a text."""


@dataclass(frozen=True)
class Task:
    """A piece of work that writes its results into an empty folder.

    Workers may perform it twice, or stop halfway: a result is published whole, and the same bytes
    are published once.
    """

    name: str
    """What progress shows."""
    key: str
    """`task_key` of everything that the result depends on."""
    work: Callable[[Path], None]
    """Goes to workers by pickle, so it is a function of a module, or a `partial` of one."""
    memory: int = 0
    """Bytes that the work takes at most, as far as they are known."""
    cores: int = 1
    """Threads of its arithmetic. Sums depend on their number, so it is part of the work."""
    alone: bool = False
    """Whether nothing may run beside it on this machine, since it measures time."""
    measured: bool = False
    """Whether the result holds measured times. Then two results differ, and the first one stays."""


def code_version() -> str:
    """The hash of the installed code, and of the data beside it (`data_sha256`)."""
    root = Path(cetane.__file__).parent
    return json_sha256([code_sha256(root), data_sha256(root)])


@cache
def data_sha256(root: Path) -> str:
    """The hash of tables and templates beside the code, the same of a wheel and of a checkout."""
    tables = (path for kind in ("toml", "txt", "csv", "j2") for path in root.rglob(f"*.{kind}"))
    own = (path for path in tables if path.relative_to(root).parts[0] not in BESIDE)
    return json_sha256({path.relative_to(root).as_posix(): sha256(path) for path in own})


def task_key(*parts: object) -> str:
    """A key: the hash of the code, and of `parts`, which JSON can hold."""
    return json_sha256([code_version(), *parts])


@dataclass(frozen=True)
class Order:
    """What a worker needs besides the task: the places of results, and the code that asks."""

    store: Store
    """Where results go."""
    shared: str | None
    """The shared store, for what the work looks up itself."""
    code: str

    def perform(self, task: Task) -> None:
        """Do the work, unless its result is there, and publish the result.

        Raises CetaneError where the work raises anything, for other code, and for a store that is
        only read.
        """
        if self.code != code_version():
            raise CetaneError(
                f"the worker {gethostname()} has another cetane than this one",
                "install the same version of cetane on every machine",
            )
        store = self.store
        if store.find(task.key) is not None:
            return
        with scratch(store) as folder, using(self.shared), threads(task.cores):
            attempt(task, folder)
            made = records(folder, folder)
            if not store.publish(task.key, folder, made, task.measured):
                raise CetaneError(
                    f"{store.url}: workers cannot write to this store", "give one with --store"
                )


def attempt(task: Task, folder: Path) -> None:
    """Do the work. An error of any kind ends this task only, so it becomes a CetaneError."""
    try:
        task.work(folder)
    except CetaneError:
        raise
    except Exception as error:
        raise CetaneError(f"{task.name}: {type(error).__name__}: {error}") from error


@contextmanager
def scratch(store: Store) -> Iterator[Path]:
    """A context with an empty folder, on the disk of a private store: files are linked there."""
    root = store.place.root if store.private and isinstance(store.place, Folder) else None
    if root is not None:
        root.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=root, prefix="cetane-task-") as own:
        folder = Path(own) / "made"  # of the usual rights, which the folder around it lacks
        folder.mkdir()
        yield folder
