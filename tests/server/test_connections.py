"""Clients that keep a connection without a request, or without reading its answer."""

import asyncio
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from tests.server.test_hostile import connect

from cetane.server.connections import FILES, PIECE, Connection, ask_for_files
from cetane.server.settings import Settings

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Application(FastAPI):
    """Says that it is healthy, and streams without end until the client leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()
        settings = Settings(seconds=0.5, body_seconds=0.1)
        self.state.service = SimpleNamespace(settings=settings, close=lambda: None, workers=())
        self.get("/health")(self.health)
        self.get("/stream")(self.stream)

    async def health(self) -> str:
        return "well"

    async def stream(self) -> StreamingResponse:
        return StreamingResponse(self.endless())

    async def endless(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(100_000)
                await asyncio.sleep(0)
        finally:
            self.ended.set()


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
def url(application: Application, serving: Callable[[Any], Any]) -> Iterator[str]:
    with serving(application) as address:
        yield address


def ends(client: socket.socket) -> bool:
    """Whether the server ends a connection, on which it says nothing before."""
    with suppress(ConnectionResetError):
        return client.recv(1000) == b""
    return True


def answered(client: socket.socket) -> None:
    client.sendall(HEAD + b"\r\n")
    answer = b""
    while not answer.endswith(b'"well"'):
        more = client.recv(1000)
        if not more:
            raise ConnectionResetError("ended without an answer")
        answer += more


def test_a_head_that_does_not_come(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,010 connections with half a head kept a server of 1,024 files from everybody."""
    monkeypatch.setattr("cetane.server.connections.HEAD_SECONDS", 0.3)
    with connect(url) as silent, connect(url) as slow, connect(url) as second:
        answered(second)  # and then half a head
        second.sendall(HEAD)
        end = time.monotonic() + 10
        with suppress(ConnectionError):  # the end
            for byte in HEAD * 50:
                assert time.monotonic() < end
                slow.sendall(bytes([byte]))
                time.sleep(0.02)
            pytest.fail("each byte gave it more time")
        assert ends(silent) and ends(second)
        with connect(url) as another:
            answered(another)


def test_an_answer_that_is_not_read(url: str, application: Application) -> None:
    with connect(url) as client:
        client.sendall(HEAD.replace(b"health", b"stream") + b"\r\n")
        assert application.ended.wait(10)


def test_connections_take_half_of_the_files(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    with connect(url) as first, connect(url) as second:
        answered(first)
        answered(second)
        with connect(url) as third:
            assert ends(third)
        answered(second)
    for _ in range(100):  # until the server has seen that they left
        with connect(url) as next_one, suppress(ConnectionError):
            answered(next_one)
            return
        time.sleep(0.05)
    pytest.fail("the connections that ended still count")


def test_a_server_asks_for_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
        ask_for_files()
        most = before[1] if before[1] != resource.RLIM_INFINITY else FILES
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(FILES, most), before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_chunks_of_a_byte_leave_others_their_turn(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio read 256 kB at once: one such client kept `/health` waiting for up to 9 s."""
    sizes, received = list[int](), Connection.data_received

    def noted(connection: Connection, data: bytes) -> None:
        sizes.append(len(data))
        received(connection, data)

    monkeypatch.setattr(Connection, "data_received", noted)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 20_000 + b"0\r\n\r\n"
    with connect(url) as client:
        client.sendall(HEAD + chunked)
        assert client.recv(1000).startswith(b"HTTP/1.1 200")
    assert max(sizes) <= PIECE < len(chunked) / 8
