"""The socket of a server, and its end by a signal."""

import asyncio
import logging
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.server.app import serve
from cetane.server.run import Server, bind, is_news


def test_a_signal_takes_no_lock() -> None:
    """It interrupts the thread of the event loop, which would wait for its own locks forever."""
    closed = []
    service: Any = type("Service", (), {"close": lambda _: closed.append(True)})()
    server = Server(uvicorn.Config("none"), service)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and not server.force_exit and not closed
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit and not closed


def test_a_second_signal_ends_without_a_traceback(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    service = (app := serve(bundle.path)).state.service
    server = Server(uvicorn.Config(app, log_level="warning", lifespan="on"), service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bind("127.0.0.1", 0)]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    thread.join()
    for worker in service.workers:
        worker.join()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "..", "no-such-host.invalid", "192.0.2.1"])
def test_a_name_that_is_no_host_of_this_machine(host: str) -> None:
    """Another port would not help: 192.0.2.1 is an address for documentation."""
    with pytest.raises(CetaneError, match=f"cannot listen on {host}:0: ") as refused:
        bind(host, 0)
    assert refused.value.hint == "try another --host"


def test_a_port_that_is_taken() -> None:
    with bind("localhost", 0) as taken, pytest.raises(CetaneError, match="in use") as refused:
        bind("localhost", taken.getsockname()[1])
    assert refused.value.hint == "try another --port"


@pytest.mark.parametrize(
    ("error", "news"), [(asyncio.CancelledError(), False), (ValueError("x"), True), (None, True)]
)
def test_an_answer_that_a_stop_cuts_off_is_no_news(
    error: BaseException | None, news: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("uvicorn.error").error("Exception in ASGI application", exc_info=error)
    (record,) = caplog.records
    assert is_news(record) is news


def test_offers_of_other_protocols_are_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """Each gave two lines of the log, with advice to install a library."""
    logger = logging.getLogger("uvicorn.error")
    connection: Any = SimpleNamespace(logger=logger, _should_upgrade_to_ws=lambda: False)
    H11Protocol._unsupported_upgrade_warning(connection)
    assert len(caplog.records) == 2 and not any(map(is_news, caplog.records))
