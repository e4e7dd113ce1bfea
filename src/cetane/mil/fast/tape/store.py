"""The weights of a program's tapes, one file: every constant once, each at its own offset."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from cetane.mil.constants import Constants
from cetane.mil.dtypes import Array
from cetane.mil.fast.forms import WeightForm
from cetane.mil.fast.tape.weights import rows_of
from cetane.mil.program import Argument

_ALIGNED = 64


@dataclass(frozen=True)
class RowOffsets:
    """Where a product's weight lies: byte offsets of its four arrays; see `weights.WeightRows`."""

    form: WeightForm
    count: int
    """Rows, a multiple of `TILE` or of `ROWS`."""
    row_bytes: int
    data: int
    scale: int
    tables: int
    palette_ids: int


class ConstantStore:
    """Appends constants to a file. Only one is in memory at a time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._known: dict[Hashable, int | RowOffsets] = {}

    def floats(self, key: Hashable, make: Callable[[], Array]) -> int:
        """The offset, in floats, of an array that is stored as float32."""
        if key not in self._known:
            self._known[key] = self._append(np.ascontiguousarray(make(), np.float32)) // 4
        offset = self._known[key]
        assert isinstance(offset, int)
        return offset

    def rows(self, constants: Constants, weight: Argument) -> RowOffsets:
        """Where the weight of a product lies. The first call for a weight stores it."""
        key = ("rows", constants.key(weight))
        if key not in self._known:
            rows = rows_of(constants, weight).grouped()
            places = [
                self._append(a) for a in (rows.data, rows.scale, rows.tables, rows.palette_ids)
            ]
            self._known[key] = RowOffsets(rows.form, len(rows.scale), rows.data.shape[1], *places)
        stored = self._known[key]
        assert isinstance(stored, RowOffsets)
        return stored

    def _append(self, array: Array) -> int:
        """The byte offset of an array."""
        self._file.seek(-(-self._file.tell() // _ALIGNED) * _ALIGNED)
        offset = self._file.tell()
        self._file.write(np.ascontiguousarray(array).data)
        return offset
