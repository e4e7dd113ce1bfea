"""The workers and the store of a command, and what it says of them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

from cetane.cli.output import progress, warn

if TYPE_CHECKING:
    from cetane.tasks.workers import Workers


@contextmanager
def crew(
    count: int | None, scheduler: str | None, store: str | None, rebuild: bool = False
) -> Iterator["Workers | None"]:
    """A context with the workers and the store that a command was given; says which they are.

    On Ctrl-C it says that nothing is lost: tasks that have ended are kept, for all commands that
    have a crew."""
    from cetane.store.settings import shared_url
    from cetane.tasks.workers import open_workers

    with ExitStack() as stack:
        with nullcontext() if scheduler is None else progress(f"waiting for {scheduler}"):
            workers = stack.enter_context(open_workers(count, scheduler, store))
        if (url := shared_url()) is not None:
            warn(f"store: {url}")
        if workers is not None and workers.dashboard is not None:
            warn(f"all tasks: {workers.dashboard}")
        try:
            yield workers
        except KeyboardInterrupt:
            same = "the same command" + (" without --rebuild" if rebuild else "")
            warn(f"what is done is kept: {same} resumes")
            raise
