"""Workers: those who perform tasks, and the way from tasks to their results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

from cetane.errors import CetaneError
from cetane.store.settings import check_store, shared_url, using
from cetane.store.store import Store
from cetane.tasks.task import Order, Task, code_version

MOST_LOST = 10
"""Workers that may die of one task before it is given up. One that is killed now and then, on a
machine that somebody else may take away, finishes nevertheless."""
ATTEMPTS = 3
"""The most times that a task is performed, if its result comes back damaged."""
Ended = tuple[Task, CetaneError | None]


class Workers(Protocol):
    """Processes of this machine, or Dask's workers."""

    @property
    def dashboard(self) -> str | None:
        """The address of a page that shows all tasks, if there is one."""

    def run(self, tasks: Sequence[Task], order: Order) -> Iterator[Ended]:
        """Perform tasks. Gives each as it ends, with its error if it has one."""


def performed(
    workers: Workers, tasks: Sequence[Task], store: Store, take: Callable[[Task, Store], bool]
) -> Iterator[Ended]:
    """Have tasks performed, and take their results from a store. Gives each task as it ends.

    `take` is called for every result; where it says False, the result is damaged, and the task is
    performed again.
    """
    order = Order(store, shared_url(), code_version())
    wanted = tasks
    for _ in range(ATTEMPTS):
        again = []
        for task, error in workers.run(wanted, order):
            if error is None and not take(task, store):
                again.append(task)
            else:
                yield task, error
        wanted = again
    for task in wanted:
        yield (
            task,
            CetaneError(
                f"{task.name}: its result is damaged in the store {store.url}", "name another store"
            ),
        )


def waiting(tasks: Sequence[Task]) -> str:
    """Tasks that nobody has finished yet, for progress."""
    return tasks[0].name if len(tasks) == 1 else f"{len(tasks)} tasks"


@contextmanager
def open_workers(
    count: "int | Workers | None" = None, scheduler: str | None = None, store: str | None = None
) -> Iterator[Workers | None]:
    """A context with the workers of `--workers` and `--scheduler`, if one of them is given, and
    with the shared store of `--store`.

    Workers that are open already stay so. A number alone asks for processes of this machine. A
    scheduler is the address of Dask's, or `local` for one that is started here with so many
    workers. Raises CetaneError for what does not answer.
    """
    with using(store), ExitStack() as stack:
        url = shared_url()
        if url is not None:
            check_store(url)
        if count is not None and not isinstance(count, int):
            yield count
        elif scheduler is not None:
            from cetane.tasks.cluster import Cluster

            yield stack.enter_context(Cluster(scheduler, count))
        elif count is not None:
            from cetane.tasks.processes import Processes

            yield stack.enter_context(Processes(count))
        else:
            yield None
