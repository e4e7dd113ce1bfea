"""Lanes: threads for requests that take long to prepare."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from cetane.server.errors import ApiError

Result = TypeVar("Result")

STACK = 64 << 20
"""Bytes of a lane's stack: eight times that of the child process in which a grammar compiled
before, so it overflows nothing here."""


class Lane:
    """Prepares requests of one kind in one thread, in the order in which they came.

    A slow one so delays only its own kind. The server's end does not wait for the thread.
    """

    def __init__(self, kind: str, queue: int) -> None:
        """`kind` names the requests in errors; `queue` of them may wait."""
        self.kind, self.queue = kind, queue
        self._inside = 0
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of some work. Raises ApiError if too many wait. For the event loop."""
        if self._inside > self.queue:
            raise ApiError(
                429, f"{self.queue} {self.kind} wait already: try again later",
                code="queue_full",
            )  # fmt: skip
        future: Future[Result] = Future()
        self._inside += 1
        try:
            self._jobs.put((future, work))
            self._start()
            return await asyncio.wrap_future(future)  # work that nobody awaits is not begun
        finally:
            self._inside -= 1

    def _start(self) -> None:
        if self._thread is not None:
            return
        usual = threading.stack_size(STACK)
        try:
            self._thread = threading.Thread(target=self._work, name=self.kind, daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        while True:
            self._do(*self._jobs.get())

    def _do(self, future: Future[Result], work: Callable[[], Result]) -> None:
        """Do some work. The thread then holds nothing of it, while it waits for the next."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # the thread must live on
            future.set_exception(error)
        finally:
            del future, work  # an error's traceback holds this frame
