"""The facts that an app's developer needs, as data."""

from typing import Literal

from cetane.validation import Data


class TensorRow(Data):
    """One input, output or state of a function."""

    direction: Literal["input", "output", "state"]
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    """The app's part: the input that it gives, or its use of the output."""


class CallSignature(Data):
    """Functions that take and give the same tensors."""

    shards: tuple[str, ...]
    functions: tuple[str, ...]
    tokens: int
    tensors: tuple[TensorRow, ...]


class CallOrder(Data):
    """The steps of a call of a mode, in order: an app calls a function in each."""

    mode: str
    tokens: int
    calls: tuple[str, ...]


class FileRow(Data):
    """A file of the bundle, or a folder that belongs together."""

    path: str
    bytes: int
    holds: str


class MemoryRow(Data):
    """Memory that an app keeps, in bytes."""

    name: str
    bytes: int
    note: str


class ForDevelopers(Data):
    """The facts that the developer of an app needs."""

    context: int
    """The number of tokens for which the caches have room."""
    deployment: str
    """The oldest system that loads the bundle."""
    files: tuple[FileRow, ...]
    calls: tuple[CallOrder, ...]
    interfaces: tuple[CallSignature, ...]
    memory: tuple[MemoryRow, ...]
    total: int
    """Bytes of all rows of memory."""
