"""Servers that send more than they are asked for."""

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.store import http
from cetane.store.places import file_system, remote_errors
from cetane.store.store import Store


class Server(BaseHTTPRequestHandler):
    """Gives 100 bytes, a million that are packed, or bytes without end."""

    def do_GET(self) -> None:
        name = self.path.strip("/")
        self.send_response(206 if self.headers.get("Range") and name != "no-ranges" else 200)
        if name == "packed":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        content = {"honest": bytes(100), "packed": gzip.compress(bytes(1_000_000))}.get(name)
        with suppress(OSError):  # the client has left
            while content is None:
                self.wfile.write(bytes(100_000))
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None: ...


class Failing(BaseHTTPRequestHandler):
    """Answers with the status that the path names, without a body or a length; a redirect leads to
    a file, or back to where it began."""

    def do_HEAD(self) -> None:
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Location", self.path if "round" in self.path else "file:///etc/passwd")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(Server) as address:
        yield address


@pytest.fixture(scope="module")
def failing() -> Iterator[str]:
    with served(Failing) as address:
        yield address


def test_an_answer_as_long_as_the_range(url: str) -> None:
    system, path = file_system(f"{url}/honest")
    assert system.cat_file(path, start=0, end=100) == bytes(100)
    assert system.cat_file(path) == bytes(100)


@pytest.mark.parametrize("name", ["endless", "no-ranges", "packed"])
def test_an_answer_longer_than_the_range(url: str, name: str) -> None:
    """All of it was read, whatever its length: without an end, until the memory was full."""
    system, path = file_system(f"{url}/{name}")
    with pytest.raises(CetaneError, match=f"/{name} gave more than the 100 bytes that were asked"):
        system.cat_file(path, start=0, end=100)


def test_a_whole_file_has_a_limit(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LARGEST", 99)
    system, path = file_system(f"{url}/honest")
    with pytest.raises(CetaneError, match="gave more than the 99 bytes"):
        system.cat_file(path)


@pytest.mark.parametrize("status", [401, 500, 503, 302])
def test_a_server_that_fails_is_no_file_that_is_missing(failing: str, status: int) -> None:
    """A model had "no config.json", and a store's results were all made again."""
    with pytest.raises(CetaneError, match=rf"cannot read .*/{status}/config.json: ") as refusal:
        open_checkpoint(f"{failing}/{status}")
    assert "credentials" in (refusal.value.hint or "")
    with pytest.raises(CetaneError, match="cannot read "):
        Store(f"{failing}/{status}").find("0" * 64)


@pytest.mark.parametrize("host", ["[", "127.0.0.1:99999", "127.0.0.1:abc", "a..b"])
def test_an_address_that_can_be_none(host: str) -> None:
    """As a store it had no results, and a port went on for minutes."""
    with pytest.raises(CetaneError, match=r"cannot read http://.*/config\.json: "):
        open_checkpoint(f"http://{host}/model")
    with pytest.raises(CetaneError, match="cannot read "):
        Store(f"http://{host}/store").find("0" * 64)


def test_redirects_without_end_are_called_so(failing: str) -> None:
    """The reason was "0, message=''"."""
    with pytest.raises(CetaneError, match=r"cannot read .*: the server redirects again and again"):
        open_checkpoint(f"{failing}/302/round")
    system, path = file_system(f"{failing}/302/round")
    with pytest.raises(CetaneError, match="redirects again"), remote_errors("cannot read"):
        system.cat_file(path, start=0, end=100)


@pytest.mark.parametrize("status", [403, 404, 410])
def test_a_file_that_is_not_there(failing: str, status: int) -> None:
    """Public buckets answer 403."""
    assert Store(f"{failing}/{status}").find("0" * 64) is None
    with pytest.raises(CetaneError, match="has no config"):
        open_checkpoint(f"{failing}/{status}")


def test_a_store_that_tells_no_size(failing: str) -> None:
    with pytest.raises(CetaneError, match="does not tell its size"):
        Store(f"{failing}/200").find("0" * 64)
