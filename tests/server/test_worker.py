"""The end of requests: when a server stops, and when their client leaves."""

import asyncio
import json
import threading
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import numpy as np
import openai
import pytest
from tests.server.test_grammar_trial import wait_for

from cetane.bundle import Bundle
from cetane.server.app import serve
from cetane.server.errors import ApiError
from cetane.server.grammar import GrammarConstraint
from cetane.server.metrics import Metrics
from cetane.server.settings import Settings
from cetane.server.worker import EVENTS, Job, Left, Worker
from cetane.server.writing import OutOfTime, Piece


def test_what_a_stop_refuses_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    served: Any = type("Served", (), {"name": "it"})
    metrics = Metrics()
    worker = Worker(served, Settings(), metrics)
    running, ended = threading.Event(), threading.Event()

    def run(_: Any) -> None:
        running.set()
        ended.wait()

    monkeypatch.setattr(worker, "_run", run)

    async def stop() -> None:
        worker.submit(())
        running.wait()
        waiting = worker.submit(())
        worker.close(0)
        with pytest.raises(ApiError, match="stopping"):
            await anext(waiting.events())
        worker.cancel(waiting)  # as its route does in the end
        with pytest.raises(ApiError, match="stopping"):
            worker.submit(())

    try:
        asyncio.run(stop())
    finally:
        ended.set()
        worker.join()
    labels = {"model": "it", "end": "refused"}
    assert metrics.registry.get_sample_value("cetane_requests_total", labels) == 2


def test_a_worker_holds_no_job_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompts stayed in memory until the next request came."""
    served: Any = type("Served", (), {"name": "it"})
    worker = Worker(served, Settings(), Metrics())
    monkeypatch.setattr(worker, "_run", lambda _: None)

    async def ask() -> weakref.ref[Job]:
        return weakref.ref(worker.submit(()))

    ended = asyncio.run(ask())
    wait_for(lambda: ended() is None)
    worker.close(0)
    worker.join()


def test_an_answer_that_a_stop_cuts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It told its client to ask when fewer requests wait."""
    served: Any = type("Served", (), {"name": "it"})
    worker = Worker(served, Settings(), Metrics())
    running = threading.Event()

    class Endless:
        def __init__(self, _: Any, __: Any, ___: Any, check: Callable[[], None], ____: Any) -> None:
            self.check = check

        def write(self, _: Any) -> None:
            running.set()
            while True:
                self.check()

    monkeypatch.setattr("cetane.server.worker.AnswerWriter", Endless)

    async def stop() -> None:
        job = worker.submit((cast(Any, None),))
        running.wait()
        assert worker.answering
        worker.close(0)
        with pytest.raises(ApiError, match="the server is stopping"):
            await anext(job.events())

    asyncio.run(stop())
    worker.join()


def test_a_client_that_does_not_read_ends_its_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three streams held 68 MB after 15 s: all that was written waited for their clients."""
    monkeypatch.setattr("cetane.server.worker.PATIENCE", 0.1)

    def write(job: Job) -> int:
        written = 0
        with pytest.raises(OutOfTime):
            while written < 10_000:
                job.emit(0, Piece("a"))
                written += 1
        return written

    async def read_some() -> None:
        job = Job((), 60)
        events = job.events()
        writing = asyncio.create_task(asyncio.to_thread(write, job))
        for _ in range(200):
            assert (await anext(events))[0] == 0
        assert await writing <= 200 + EVENTS

    asyncio.run(read_some())


def test_the_longer_the_queue_the_less_one_client_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 64 clients that read nothing held up all others for ten seconds."""
    monkeypatch.setattr("cetane.server.worker.PATIENCE", 3600)

    async def fill() -> None:
        job = Job((), 60)
        with pytest.raises(OutOfTime):
            for _ in range(EVENTS + 1):
                job.emit(0, Piece("a"), waiting=10**6)

    asyncio.run(fill())


def test_an_answer_that_the_clock_cuts_is_an_error(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an answer with the finish reason of its client's own limit."""
    checks = count()

    def check(_: Job) -> None:
        if next(checks) == 6:
            raise OutOfTime

    monkeypatch.setattr(Job, "check", check)
    asked: Any = {"model": "tiny", "prompt": "x", "max_tokens": 40, "logit_bias": {"0": -100}}
    with pytest.raises(openai.APIStatusError, match="time of this request") as cut:
        client.completions.create(**asked)
    assert (cut.value.status_code, cut.value.code) == (503, "timeout")
    checks = count()
    chunks = []
    with pytest.raises(openai.APIError, match="time of this request"):
        chunks.extend(client.completions.create(stream=True, **asked))
    assert chunks


def test_a_grammar_that_fails_in_an_answer_is_the_clients_error(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was one of the server, with status 500."""
    used = count()

    def allowed(self: GrammarConstraint) -> Any:
        if next(used) == 2:
            raise self.failed()
        return np.ones(self.vocab, bool)

    monkeypatch.setattr(GrammarConstraint, "allowed", allowed)
    regex = {"type": "regex", "regex": "(.|\\n)*"}
    asked: Any = {"model": "tiny", "prompt": "x", "extra_body": {"response_format": regex}}
    with pytest.raises(openai.BadRequestError, match="the grammar failed in the answer") as told:
        client.completions.create(**asked, logit_bias={"0": -100})
    assert told.value.param == "response_format"


def test_a_worker_that_waits_for_a_client_learns_that_it_left() -> None:
    async def leave() -> None:
        job = Job((), 60)
        for _ in range(EVENTS):
            job.emit(0, Piece("a"))
        waiting = asyncio.create_task(asyncio.to_thread(job.emit, 0, Piece("a")))
        job.leave()
        with pytest.raises(Left):
            await asyncio.wait_for(waiting, 5)

    asyncio.run(leave())


def test_a_client_that_leaves_before_the_first_line_is_sent(bundle: Bundle) -> None:
    """Its stream is cancelled before it has begun."""
    app = serve(bundle.path)
    worker = app.state.service.worker(None)
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 900, "n": 8, "stream": True,
             "logit_bias": {"0": -100}}  # fmt: skip
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST",
             "path": "/v1/completions", "query_string": b"",
             "headers": [(b"content-type", b"application/json")]}  # fmt: skip
    calls = iter(range(100))

    async def receive() -> dict[str, Any]:
        match next(calls):
            case 0:
                return {"type": "http.request", "body": json.dumps(asked).encode()}
            case 1 | 2 | 3:
                await asyncio.Event().wait()  # until it is parsed, prepared, and has its first line
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pass

    asyncio.run(app(scope, receive, send))
    app.state.service.close()
    worker.join()
    labels = {"model": "tiny", "end": "left"}
    assert worker.metrics.registry.get_sample_value("cetane_requests_total", labels) == 1
