"""The compiler: one thread for requests with a grammar, and a trial of every grammar.

llguidance trusts its grammars. One of a few hundred bytes can keep it busy for ever or end the
process: a chain of 3,000 rules overflows its stack. Neither can be caught, so a child process
compiles each grammar first.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Any, TypeVar

from cetane.checkpoint.sandbox import Sandbox
from cetane.errors import CetaneError
from cetane.server.errors import ApiError

Result = TypeVar("Result")

SECONDS, MEMORY = 5, 2 << 30
"""CPU seconds and bytes of address space of a trial. The largest schema of OpenAI's API, with 5,000
properties, takes 0.9 s; one with 100 takes 0.3 s, nearly all of it the child's start."""
STACK = 64 << 20
"""Bytes of the thread's stack: eight times the child's, so what the child compiled overflows
nothing here."""
CODE = """
from llguidance import LLMatcher
LLMatcher.validate_grammar(sys.stdin.buffer.read().decode())
"""
SANDBOX = Sandbox(CODE, SECONDS, MEMORY, 3 * SECONDS, {"RAYON_NUM_THREADS": "1"})


@lru_cache(maxsize=32)
def check_compiles(grammar: str) -> None:
    """Raise CetaneError if llguidance comes to no end with a grammar within the limits. A wrong
    grammar passes. Clients send the same few again and again, so the last that passed are kept."""
    if not SANDBOX.succeeds(grammar.encode()):
        raise CetaneError(
            f"the grammar needs more than {SECONDS} s or {MEMORY >> 30} GB, or is nested too"
            " deeply: make it simpler"
        )


class Compiler:
    """Prepares the requests with a grammar in one thread, in the order in which they came.

    A slow grammar so delays only other grammars. The server's end does not wait for the thread.
    """

    def __init__(self, queue: int) -> None:
        """`queue` requests may wait."""
        self.queue = queue
        self._inside = 0
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of some work. Raises ApiError if too many wait. For the event loop."""
        if self._inside > self.queue:
            raise ApiError(
                429, f"{self.queue} requests with grammars wait already: try again later",
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
            self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
            self._thread.start()
        finally:
            threading.stack_size(usual)

    def _work(self) -> None:
        while True:
            future, work = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # the thread must live on
                future.set_exception(error)
