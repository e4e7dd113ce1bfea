"""The worker: one thread and one queue for each model."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.metrics import Metrics
from cetane.server.served import Served
from cetane.server.settings import Settings
from cetane.server.writing import AnswerWriter, Ask, Ending, Event, OutOfTime

EVENTS = 64
"""Events of an answer that may wait for its client: one may hold 64 scores with 20 tokens each."""
PATIENCE = 10.0
"""Seconds that a worker waits for a client that does not read. All requests that wait share them:
each more of them shortens the time."""


class Left(Exception):
    """The client has left, so nobody wants the answer."""


class Job:
    """A request on its way: what is asked, and what has been written of it."""

    def __init__(self, asks: Sequence[Ask], seconds: float) -> None:
        """Made on the event loop that reads its events."""
        self.asks = tuple(asks)
        self.asked = time.perf_counter()
        self.deadline = self.asked + seconds
        self.left = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event] | ApiError | None] = asyncio.Queue()
        self._room = threading.Semaphore(EVENTS)

    def leave(self) -> None:
        """Note that the client has left, also if the worker waits for it."""
        self.left = True
        self._room.release()

    def emit(self, number: int, event: Event, waiting: int = 0) -> None:
        """Hand over what is written of an ask, when there is room. For the worker's thread, while
        so many other requests are `waiting`.

        Raises Left, and OutOfTime if the client does not read.
        """
        if not self._room.acquire(timeout=PATIENCE / (1 + waiting)):
            raise OutOfTime
        if self.left:
            raise Left
        self.put((number, event))

    def check(self) -> None:
        """Raise Left or OutOfTime if the job should end."""
        if self.left:
            raise Left
        if time.perf_counter() > self.deadline:
            raise OutOfTime

    def put(self, event: "tuple[int, Event] | ApiError | None") -> None:
        """Hand an event to the event loop; None is the end. For any thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """The number of an ask, and what is written of its answer. Raises ApiError."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, ApiError):
                raise event
            self._room.release()
            yield event


class Worker:
    """Runs the jobs of a model in the order in which they came, one at a time."""

    def __init__(self, served: Served, settings: Settings, metrics: Metrics) -> None:
        self.served, self.settings, self.metrics = served, settings, metrics
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._running: Job | None = None
        self._closing = False
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Take jobs again after `close`."""
        with self._changed:
            self._closing = False

    def submit(self, asks: Sequence[Ask]) -> Job:
        """Put a job into the queue. Raises ApiError if the queue is full or closed.

        The first job starts the thread. Startup events cannot: an application that is mounted in
        another one gets none.
        """
        job = Job(asks, self.settings.seconds)
        with self._changed:
            if self._closing:
                self._end("refused")
                raise closing()
            busy = self._running is not None or bool(self._queue)
            if busy and len(self._queue) >= self.settings.queue:
                self._end("refused")
                raise ApiError(
                    429, f"{len(self._queue)} requests wait already: try again later",
                    code="queue_full",
                )  # fmt: skip
            self._queue.append(job)
            self._gauge()
            if self._thread is None:
                name = f"model {self.served.name}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()
        return job

    def cancel(self, job: Job) -> None:
        """End a job whose client has left: at once if it waits, else before the next step."""
        job.leave()
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
                self._end("left")
                self._gauge()

    def close(self, grace: float) -> None:
        """Take no more jobs, refuse those that wait, and end the running one within `grace`
        seconds."""
        with self._changed:
            self._closing = True
            while self._queue:
                self._end("refused")
                self._queue.popleft().put(closing())
            if self._running is not None:
                end = time.perf_counter() + grace
                self._running.deadline = min(self._running.deadline, end)
            self._gauge()
            self._changed.notify()

    @property
    def answering(self) -> bool:
        """Whether an answer is being written."""
        return self._running is not None

    def join(self) -> None:
        """Wait until the running job has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._gauge()
                while not self._queue and not self._closing:
                    self._changed.wait()
                if not self._queue:
                    return
                job = self._running = self._queue.popleft()
                self._gauge()
            self.metrics.queued.labels(self.served.name).observe(time.perf_counter() - job.asked)
            self._run(job)
            del job  # its prompts may have a million tokens, and the next one may be far

    def _run(self, job: Job) -> None:
        """Write all answers of a job. Whatever fails ends this job only."""
        try:
            for number, ask in enumerate(job.asks):
                job.check()
                asked = None if number else job.asked
                writer = AnswerWriter(self.served, ask, self.metrics, job.check, asked)
                emit = partial(self._emit, job, number)
                ending = writer.write(emit)
                self._count(ending)
                emit(ending)
            self._end("answered")
            job.put(None)
        except Left:
            self._end("left")
        except OutOfTime:
            self._end("timeout")
            job.put(closing() if self._closing else late())
        except ApiError as error:  # a limit of the request's own grammar
            self._end("failed")
            job.put(error)
        except CetaneError as error:
            self._end("failed")
            job.put(ApiError(500, str(error)))
        except BaseException as error:  # the thread must live on
            self._end("failed")
            job.put(ApiError(500, f"{type(error).__name__}: {error}"))

    def _emit(self, job: Job, number: int, event: Event) -> None:
        job.emit(number, event, len(self._queue))

    def _count(self, ending: Ending) -> None:
        """Add an answer to the metrics."""
        name, metrics = self.served.name, self.metrics
        metrics.prompt_tokens.labels(name).inc(ending.prompt)
        metrics.cached_tokens.labels(name).inc(ending.cached)
        metrics.tokens.labels(name).inc(ending.tokens)
        metrics.drafted.labels(name).inc(ending.drafted)
        metrics.accepted.labels(name).inc(ending.accepted)
        metrics.prefixes.labels(name, "hit" if ending.cached else "miss").inc()

    def _end(self, how: str) -> None:
        self.metrics.requests.labels(self.served.name, how).inc()

    def _gauge(self) -> None:
        name = self.served.name
        self.metrics.waiting.labels(name).set(len(self._queue))
        self.metrics.running.labels(name).set(self._running is not None)


def late() -> ApiError:
    return ApiError(
        503,
        "the time of this request is over before its answer is whole: ask for fewer tokens, or ask "
        "when fewer requests wait",
        code="timeout",
    )


def closing() -> ApiError:
    return ApiError(503, "the server is stopping", code="stopping")
