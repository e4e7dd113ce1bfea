"""The end of requests: when a server stops, and when their client leaves."""

import asyncio
import json
import threading
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.server.app import serve
from cetane.server.errors import ApiError
from cetane.server.metrics import Metrics
from cetane.server.settings import Settings
from cetane.server.worker import Worker


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
