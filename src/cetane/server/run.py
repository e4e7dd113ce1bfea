"""Running a server: its socket, and its end by a signal."""

import asyncio
import errno
import logging
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from cetane.errors import CetaneError
from cetane.server.connections import Connection, ask_for_files
from cetane.server.service import Service

BACKLOG = 128
"""Connections that the system may hold ready, so the most that the event loop takes at once."""
UPGRADES = ("Unsupported upgrade request", "No supported WebSocket library")
"""How uvicorn's warnings begin about a client that offers another protocol, as curl does."""


class Server(uvicorn.Server):
    """A server that tells its workers when it is asked to stop, and then ends normally."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # a second signal does not wait
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called by the event loop soon after the signal. `handle_exit` must not close: it may
        interrupt this thread where it holds a lock of the metrics."""
        self.service.close()
        if any(worker.answering for worker in self.service.workers):
            logging.getLogger("uvicorn.error").warning(
                "stopping: running answers have %g s; another Ctrl-C ends them",
                self.service.settings.grace,
            )
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises CetaneError if the address is taken or is not
    one of this machine."""
    try:
        address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(address[0], socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address[4])
        bound.listen(BACKLOG)
    except (OSError, UnicodeError) as error:  # Python cannot encode a name that no host can have
        reason = getattr(error, "strerror", None) or str(error)
        no_host = (
            isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
        )
        raise CetaneError(
            f"cannot listen on {host}:{port}: {reason}",
            f"try another {'--host' if no_host else '--port'}",
        ) from error
    return bound


def is_news(record: logging.LogRecord) -> bool:
    """Whether the log should have a record: uvicorn writes a traceback for each answer that the
    server's end cuts off, and advice to install a library for each offer of another protocol."""
    if record.getMessage().startswith(UPGRADES):
        return False
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def config_of(app: FastAPI) -> uvicorn.Config:
    """How uvicorn runs an application. No route is for WebSockets, and uvicorn would take their
    connections out of those that `Connection` counts and ends."""
    service: Service = app.state.service
    return uvicorn.Config(
        app, http=Connection, ws="none", backlog=BACKLOG, log_level="warning", server_header=False,
        lifespan="on", timeout_graceful_shutdown=int(service.settings.grace) + 5,
    )  # fmt: skip


def run(app: FastAPI, bound: socket.socket) -> None:
    """Serve until a signal ends it. Answers that are being written may end first."""
    ask_for_files()
    logging.getLogger("uvicorn.error").addFilter(is_news)
    Server(config_of(app), app.state.service).run(sockets=[bound])
