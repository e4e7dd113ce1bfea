"""Work for workers: functions of a module, which processes of their own import."""

import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from cetane.errors import CetaneError
from cetane.tasks.task import Order, Task, task_key
from cetane.tasks.workers import Ended
from cetane.threads import available


class Inline:
    """Workers in the test's own process, which get tasks as others do: by pickle."""

    dashboard = None

    def __init__(self) -> None:
        self.performed: list[str] = []

    def run(self, tasks: Sequence[Task], order: Order) -> Iterator[Ended]:
        for task in tasks:
            there, asked = pickle.loads(pickle.dumps((task, order)))
            self.performed.append(task.name)
            try:
                asked.perform(there)
            except CetaneError as error:
                yield task, error
            else:
                yield task, None


def write(text: str, folder: Path) -> None:
    (folder / "text").write_text(text)


@cache
def first() -> int:
    return available()


def threads_at_first(folder: Path) -> None:
    """The threads of arithmetic at the first such task of this process."""
    write(str(first()), folder)


def fail(folder: Path) -> None:
    raise ValueError("a fault of a library")


def refuse(folder: Path) -> None:
    raise CetaneError("no such weight", "download it again")


def die_once(marker: Path, folder: Path) -> None:
    """Die as a process that the system kills, at the first attempt."""
    if not marker.exists():
        marker.touch()
        (folder / "text").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    write("whole", folder)


def die(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def task(name: str, work: partial[None], **options: bool) -> Task:
    return Task(name, task_key("test", name), work, **options)
