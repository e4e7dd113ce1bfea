"""Checkpoints that are not on this machine: headers and single tensors are read by byte range.

config.json, the tokenizer's files and the index are copied into the cache folder. Of the weights,
a build reads what it needs, and a worker what its shard needs.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cetane.checkpoint.safetensors import SafetensorsCheckpoint
from cetane.checkpoint.safetensors_files import INDEX, WEIGHTS, read_header, read_index
from cetane.checkpoint.stored_tensors import Identity
from cetane.checkpoint.tokenizer_files import TOKENIZER_FILES
from cetane.errors import CetaneError
from cetane.files import (
    LARGEST,
    cache_dir,
    content_identity,
    file_identity,
    json_sha256,
    replacing,
)
from cetane.store.places import file_system, info_of, remote_errors, split

SMALL = ("config.json", INDEX, *TOKENIZER_FILES)
"""Files that are copied whole."""
PIECE = 1 << 24
"""Bytes of a whole file that are read at a time."""


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file at a URL, as it was when the checkpoint was opened."""

    url: str
    size: int
    sha256: str | None
    """Of the content, where the server knows it, as the Hugging Face hub does."""
    version: str | None
    """What the server says of the file's version: its ETag."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    def read(self, offset: int, nbytes: int) -> bytearray:
        """A range of bytes, which the caller has checked against the size."""
        if nbytes == 0:
            return bytearray()
        system, path = file_system(self.url)
        with remote_errors(f"cannot read {self.url}"):
            content = bytearray(system.cat_file(path, start=offset, end=offset + nbytes))
        if len(content) != nbytes:
            raise CetaneError(
                f"{self.url} gave {len(content)} bytes where {nbytes} were asked for",
                "it changed, or the server does not serve ranges: copy the model to this machine",
            )
        return content

    @cached_property
    def content_sha256(self) -> str:
        """The hash of the whole file, for servers that tell no version."""
        digest = hashlib.sha256()
        for start in range(0, self.size, PIECE):
            digest.update(self.read(start, min(PIECE, self.size - start)))
        return digest.hexdigest()

    @property
    def told(self) -> str:
        """A text that differs for another content: a hash, or the server's version."""
        return self.sha256 or self.version or self.content_sha256

    def identity(self, identity: Identity) -> str:
        """The identity of the file: by its name and content, or for `file_identity` by what the
        server tells, without reading it."""
        if identity is file_identity:
            return f"{self.name} {self.size} {self.sha256 or self.version}\n"
        return f"{self.name} {self.told}\n"


class RemoteCheckpoint(SafetensorsCheckpoint):
    """A folder in the form of `save_pretrained`, at a URL."""

    @classmethod
    def at(cls, url: str) -> RemoteCheckpoint:
        """Open the folder at `url`. CetaneError if it holds no checkpoint, or does not answer."""
        if not split(url)[1].strip("/"):
            raise CetaneError(f"{url} names no place", "give the URL of a model's folder")
        url = url.rstrip("/")
        folder = copied(url)
        weights = stat_of(f"{url}/{WEIGHTS}")
        if weights is not None:
            tensors = read_header(weights)
        elif (folder / INDEX).is_file():

            def shard(name: str) -> RemoteFile:
                file = stat_of(f"{url}/{name}")
                if file is None:
                    raise CetaneError(f"{url} has no {name}, which its {INDEX} names")
                return file

            tensors = read_index(folder / INDEX, shard)
        else:
            raise CetaneError(f"{url} has no {WEIGHTS} and no {INDEX}", "give a model's folder")
        return cls(url, folder, tensors)

    def identified(self, identity: Identity) -> str:
        if not self.folder.is_dir():  # another machine opened it
            copied(self.source)
        return super().identified(identity)

    def _identity_beside(self, path: Path, identity: Identity) -> str:
        return content_identity(path)  # its date is that of the copy


def copied(url: str) -> Path:
    """The folder with the copies of a checkpoint's small files, of their present versions."""
    files = {name: file for name in SMALL if (file := stat_of(f"{url}/{name}")) is not None}
    if "config.json" not in files:
        raise CetaneError(f"{url} has no config.json", "give the URL of a model's folder")
    for file in files.values():
        if file.size > LARGEST:  # before `told`, which may read it
            raise CetaneError(f"{file} is larger than the {LARGEST:,} bytes it may have")
    told = [[f.url, f.size, f.told] for f in files.values()]
    folder = cache_dir() / "remote" / json_sha256(told)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing(folder) as partial:
            partial.mkdir()
            for name, file in files.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(file.read(0, file.size))
    return folder


def stat_of(url: str) -> RemoteFile | None:
    """A file at a URL; None if there is none."""
    system, path = file_system(url)
    info = info_of(system, path)
    if info is None:
        return None
    if info.get("type") != "file" or not isinstance(info.get("size"), int):
        raise CetaneError(f"{url}: no file whose size the server tells")
    lfs = info.get("lfs")
    version = info.get("ETag") or info.get("etag")
    weak = isinstance(version, str) and version.startswith("W/")
    sha256 = getattr(lfs, "sha256", None) or (lfs.get("sha256") if isinstance(lfs, dict) else None)
    return RemoteFile(url, info["size"], sha256, None if weak or not version else str(version))
