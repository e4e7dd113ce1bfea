"""The account of requests when a server stops."""

import asyncio
import threading
from typing import Any

import pytest

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
