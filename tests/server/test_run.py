"""The socket of a server, and its end by a signal."""

import signal
from typing import Any

import pytest
import uvicorn

from cetane.errors import CetaneError
from cetane.server.run import Server, bind


def test_a_signal_takes_no_lock() -> None:
    """It interrupts the thread of the event loop, which would wait for its own locks forever."""
    closed = []
    service: Any = type("Service", (), {"close": lambda _: closed.append(True)})()
    server = Server(uvicorn.Config("none"), service)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and not server.force_exit and not closed
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit and not closed


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "..", "no-such-host.invalid"])
def test_a_name_that_is_no_host(host: str) -> None:
    with pytest.raises(CetaneError, match=f"cannot listen on {host}:0: "):
        bind(host, 0)
