"""Weight files: a 64-byte header, then per tensor a 64-byte record and its data.

The layout is that of MILBlob, the storage library inside coremltools. The file is memory-mapped, so
opening a package reads no weights.
"""

import struct
from pathlib import Path

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array, byte_count, from_bytes

_RECORD = struct.Struct("<IIQQ")  # sentinel, dtype, size in bytes, offset of the data
_SENTINEL = 0xDEADBEEF
_DTYPES = {
    1: "fp16",
    2: "fp32",
    3: "uint8",
    4: "int8",
    6: "int16",
    7: "uint16",
    8: "int4",
    9: "uint1",
    10: "uint2",
    11: "uint4",
    12: "uint3",
    13: "uint6",
    14: "int32",
    15: "uint32",
}


class BlobFile:
    """One weight file. A tensor is named by the byte offset of its record."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes = np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, "u1")

    def read(self, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """The tensor at `offset`. Raises CetaneError as `check` does."""
        start, size = self.check(offset, dtype, shape)
        return from_bytes(self._bytes[start : start + size], dtype, shape)

    def check(self, offset: int, dtype: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """First byte and number of bytes of the tensor at `offset`.

        Raises CetaneError if the file holds another type or size there.
        """
        code, start, size = self._record(offset)
        if _DTYPES.get(code) != dtype or size != byte_count(dtype, shape):
            stored = _DTYPES.get(code, f"type {code}")
            where = f"{self.path} at byte {offset}"
            raise CetaneError(f"{where}: expected {dtype} {shape}, found {stored} in {size} bytes")
        return start, size

    def extent(self, offset: int) -> tuple[int, int]:
        """First byte and number of bytes of the data whose record is at `offset`.

        Raises CetaneError if there is no record, or if the file ends before its data.
        """
        _, start, size = self._record(offset)
        return start, size

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._bytes.size

    def bytes(self, start: int, stop: int) -> Array:
        """The file's bytes from `start` to `stop`, uint8."""
        return self._bytes[start:stop]

    def _record(self, offset: int) -> tuple[int, int, int]:
        """Type, first byte and number of bytes of the data whose record is at `offset`."""
        where = f"{self.path} at byte {offset}"
        record = self._bytes[offset : offset + _RECORD.size]
        if record.size < _RECORD.size:
            raise CetaneError(f"{where}: the file ends before the tensor's record")
        sentinel, code, size, start = _RECORD.unpack(record.tobytes())
        if sentinel != _SENTINEL:
            raise CetaneError(f"{where}: there is no tensor record here")
        if start + size > self._bytes.size:
            raise CetaneError(f"{where}: the file ends before the tensor's data")
        return code, start, size
