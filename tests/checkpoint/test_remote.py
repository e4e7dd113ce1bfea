"""Checkpoints at URLs: the same tensors as on the disk, with no byte more than is asked for."""

import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch

from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.remote import RemoteFile
from cetane.checkpoint.tokenizer_files import TEMPLATE_FILES
from cetane.errors import CetaneError

URL = "memory://models/tiny"


class Ranges(SimpleHTTPRequestHandler):
    """A server of a folder that serves ranges and tells versions, as object stores do."""

    asked: ClassVar[list[tuple[str, int]]] = []

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            return self.send_error(404)
        content = path.read_bytes()
        start, stop = 0, len(content)
        if given := self.headers.get("Range"):
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(stop, int(last or stop) + 1)
        self.asked.append((path.name, stop - start))
        self.send_response(206 if given else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{path.stat().st_mtime_ns}"')
        self.send_header("Content-Length", str(stop - start))
        if given:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start:stop])
        return None

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def served(tiny_checkpoint_folder: Path) -> Iterator[str]:
    def handler(*a: Any) -> Ranges:
        return Ranges(*a, directory=str(tiny_checkpoint_folder))

    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def in_memory_files(tiny_checkpoint_folder: Path) -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    for path in tiny_checkpoint_folder.iterdir():
        system.pipe_file(f"/models/tiny/{path.name}", path.read_bytes())
    yield system
    system.rm("/models", recursive=True)


def same(url: str, folder: Path) -> None:
    here, there = open_checkpoint(folder), open_checkpoint(url)
    assert there.names() == here.names() and there.config == here.config
    for name in here.names():
        assert torch.equal(there.read(name), here.read(name))
    name = "model.embed_tokens.weight"
    assert torch.equal(there.read_rows(name, 3, 7), here.read(name)[3:7])
    assert there.tokenizer.encode("a fuel") == here.tokenizer.encode("a fuel")


def test_tensors_are_those_of_the_files(in_memory_files: Any, tiny_checkpoint_folder: Path) -> None:
    same(URL, tiny_checkpoint_folder)
    same(f"file://{tiny_checkpoint_folder}", tiny_checkpoint_folder)


def test_a_server_gives_no_byte_more_than_is_asked_for(
    served: str, tiny_checkpoint_folder: Path
) -> None:
    same(served, tiny_checkpoint_folder)
    Ranges.asked.clear()
    checkpoint = open_checkpoint(served)
    checkpoint.read("model.norm.weight")
    read = sum(size for name, size in Ranges.asked if name == "model.safetensors")
    whole = (tiny_checkpoint_folder / "model.safetensors").stat().st_size
    heads = whole  # fsspec asks for a file's size with HEAD, whose answer counts here as the file
    assert read - heads * (read // whole) < 20_000 and read // whole <= 2


def test_identities(in_memory_files: Any) -> None:
    """Equal content has equal keys, wherever it lies; other content has others."""
    first = open_checkpoint(URL)
    fingerprint, content = first.fingerprint, first.content
    again = open_checkpoint(URL)
    assert (again.fingerprint, again.content) == (fingerprint, content)
    again.check_unchanged()
    changed = bytearray(in_memory_files.cat_file("/models/tiny/model.safetensors"))
    changed[-1] ^= 1
    in_memory_files.pipe_file("/models/tiny/model.safetensors", bytes(changed))
    other = open_checkpoint(URL)
    assert other.content != content


def test_a_file_in_a_folder(in_memory_files: Any) -> None:
    plain = open_checkpoint(URL)
    in_memory_files.pipe_file(f"/models/tiny/{TEMPLATE_FILES['tool_use']}", b"tools")
    other = open_checkpoint(URL)
    assert plain.tokenizer.tool_template is None and other.tokenizer.tool_template == "tools"
    assert other.content != plain.content


def test_what_is_no_checkpoint(in_memory_files: Any) -> None:
    with pytest.raises(CetaneError, match="has no config"):
        open_checkpoint("memory://nothing/here")
    for url in ("ftp://a/b", "simplecache::memory://models/tiny", "zip://a::file://b"):
        with pytest.raises(CetaneError, match="no place that cetane reads"):
            open_checkpoint(url)
    for url in ("gs://", "http://", "file:///"):
        with pytest.raises(CetaneError, match=f"{url} names no place"):
            open_checkpoint(url)
    in_memory_files.rm("/models/tiny/model.safetensors")
    with pytest.raises(CetaneError, match="has no model"):
        open_checkpoint(URL)


def test_a_small_file_that_is_large(in_memory_files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without versions may state any size, and the file was read for its hash."""
    monkeypatch.setattr("cetane.checkpoint.remote.LARGEST", 10)
    monkeypatch.setattr(RemoteFile, "read", lambda *_: pytest.fail("it is read"))
    with pytest.raises(CetaneError, match="larger than the 10 bytes"):
        open_checkpoint(URL)


def test_a_server_that_gives_other_bytes_than_asked_for(in_memory_files: Any) -> None:
    """It serves no ranges, or the file became shorter."""
    file = RemoteFile(f"{URL}/config.json", 10**6, None, None)
    with pytest.raises(CetaneError, match="bytes where 1000000 were asked for"):
        file.read(0, 10**6)
