"""Stored tensors: the places of their bytes in files, on this machine or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cetane.files import read_exactly

Identity = Callable[[Path], str]
"""A function of a file's path. Its text differs between different files."""


class RangedFile(Protocol):
    """A file that is not on this machine (`remote.py`)."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read(self, offset: int, nbytes: int) -> bytearray: ...
    def identity(self, identity: Identity) -> str: ...


StoredFile = Path | RangedFile


def identity_of(file: StoredFile, identity: Identity) -> str:
    """The identity of a file, on this machine or not."""
    return identity(file) if isinstance(file, Path) else file.identity(identity)


def read_range(file: StoredFile, offset: int, nbytes: int) -> bytearray:
    """A range of bytes, which the caller must check against the file's size. Raises CetaneError if
    it cannot be read."""
    if isinstance(file, Path):
        return read_exactly(file, offset, nbytes)
    return file.read(offset, nbytes)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor's bytes in a file. The range was checked against the file's size."""

    file: StoredFile
    offset: int  # bytes from the start of the file
    nbytes: int
    shape: tuple[int, ...]
    dtype: str  # the file's own name: F32, F16, BF16, Q4_1 ...

    @property
    def stored_as(self) -> str:
        """The number format, for messages and tables."""
        return self.dtype

    def read(self) -> bytearray:
        return read_range(self.file, self.offset, self.nbytes)

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Rows `start` to `stop` along axis 0. The caller must check them against the shape.

        This works only for formats whose rows all have the same number of bytes, so not for GGUF's
        vectors.
        """
        row = self.nbytes // max(1, self.shape[0])
        shape = (stop - start, *self.shape[1:])
        begin = self.offset + start * row
        return StoredTensor(self.file, begin, (stop - start) * row, shape, self.dtype)


@dataclass(frozen=True, slots=True)
class StackedTensor(StoredTensor):
    """Stored tensors of one shape and dtype, joined along a new axis 0.

    `file` and `offset` are those of the first part; the others may lie anywhere.
    """

    parts: tuple[StoredTensor, ...]

    @classmethod
    def stack(cls, parts: tuple[StoredTensor, ...]) -> StackedTensor:
        """Stack `parts`: at least one, of equal shape and dtype, which the caller must check."""
        first = parts[0]
        nbytes = len(parts) * first.nbytes
        shape = (len(parts), *first.shape)
        return cls(first.file, first.offset, nbytes, shape, first.dtype, parts)

    def read(self) -> bytearray:
        data = bytearray()
        for part in self.parts:
            data += part.read()
        return data

    def rows(self, start: int, stop: int) -> StoredTensor:
        if start == stop:
            return StoredTensor(self.file, self.offset, 0, (0, *self.shape[1:]), self.dtype)
        return StackedTensor.stack(self.parts[start:stop])


@dataclass(frozen=True, slots=True)
class JoinedTensor(StoredTensor):
    """Stored tensors joined along axis 0, one after the other.

    `file`, `offset` and `dtype` are those of the first part.
    """

    parts: tuple[StoredTensor, ...]

    @classmethod
    def join(cls, parts: tuple[StoredTensor, ...]) -> JoinedTensor:
        """Join `parts`: at least one, with equal columns, which the caller must check."""
        first = parts[0]
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        nbytes = sum(part.nbytes for part in parts)
        return cls(first.file, first.offset, nbytes, shape, first.dtype, parts)

    def read(self) -> bytearray:
        return bytearray().join(part.read() for part in self.parts)

    def rows(self, start: int, stop: int) -> StoredTensor:
        raise NotImplementedError("a joined tensor is only read whole")
