"""Connections: uvicorn's, with limits for clients that keep the server waiting."""

import asyncio
import resource
import socket
import struct
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

HEAD_SECONDS = 10.0
"""The longest time in which a client sends the head of a request."""
FILES = 10_240
"""The open files that a server asks for, sockets among them: the most that macOS gives, where 256
are usual."""
PIECE = 1 << 13
"""Bytes of a connection that are read at a time, before others get their turn. asyncio reads 32
times as many: in chunks of one byte these keep h11 busy for 0.3 s."""
DROP_UNSENT = struct.pack("ii", 1, 0)
"""SO_LINGER, so that the system does not keep what the client has not read."""


def ask_for_files() -> None:
    """Raise this process's limit of open files to `FILES`, or as far as the system allows."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < FILES:  # without a limit, Linux says -1
        limit = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A connection that ends if its client sends no request, or does not read its answer.

    uvicorn's `timeout_keep_alive` holds only after an answer, and up to the first byte. Connections
    take at most half of the files, so that the process can always open others.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        app: Any = config.app
        settings = app.state.service.settings
        self.request_seconds = settings.seconds + 2 * settings.body_seconds
        """For the body, the answer, and the reading of its rest."""
        self.timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.end_in(HEAD_SECONDS)
        if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * len(self.connections):
            self.end()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timer is not None:
            self.timer.cancel()

    def get_buffer(self, sizehint: int) -> bytearray:
        self.buffer = bytearray(PIECE)
        return self.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.buffer[:nbytes]))

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self.end_in(self.request_seconds)

    def on_response_complete(self) -> None:
        if not self.transport.get_write_buffer_size():  # else the client has not read all of it
            self.end_in(HEAD_SECONDS)
        super().on_response_complete()  # which may begin the next request

    def end_in(self, seconds: float) -> None:
        """End the connection in some seconds, in place of any earlier end."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self.loop.call_later(seconds, self.end)

    def end(self) -> None:
        """End the connection at once."""
        bound: socket.socket = self.transport.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, DROP_UNSENT)
        self.transport.abort()
