"""How a host's table keeps its rows: each format as a pair of encode and decode on arrays."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cetane.errors import CetaneError
from cetane.schema.function import TablePlan
from cetane.schema.recipe import RowFormatName

Array = npt.NDArray[Any]
BLOCK = 32
"""Columns of an int4 row that share a scale."""


class RowFormat(ABC):
    """A format of rows. A table is one array for each of its parts, with a row for each token."""

    name: ClassVar[RowFormatName]

    @abstractmethod
    def stored(self, table: TablePlan) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The dtype and the shape of every part of a table.

        Raises CetaneError for a table that the format cannot hold.
        """

    @abstractmethod
    def encode(self, rows: Array) -> dict[str, Array]:
        """The parts of some rows `(n, C)`, fp32."""

    @abstractmethod
    def decode(self, parts: Mapping[str, Array]) -> Array:
        """The rows `(..., C)` of parts `(..., ...)`: fp16 as stored, or fp32."""

    def nbytes(self, table: TablePlan) -> int:
        """The bytes of a table; CetaneError as `stored`."""
        return sum(np.dtype(dtype).itemsize * prod(shape)
                   for dtype, shape in self.stored(table).values())  # fmt: skip


class Halves(RowFormat):
    """Rows in fp16."""

    name = "fp16"

    def stored(self, table: TablePlan) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {"values": ("<f2", (table.rows, table.channels))}

    def encode(self, rows: Array) -> dict[str, Array]:
        return {"values": rows.astype(np.float16)}

    def decode(self, parts: Mapping[str, Array]) -> Array:
        return parts["values"]


class Int8(RowFormat):
    """int8 rows, each with an fp16 scale, its largest magnitude: row = values * scale / 127.

    CoreML-LLM stores its rows so too.
    """

    name = "int8"

    def stored(self, table: TablePlan) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {
            "values": ("|i1", (table.rows, table.channels)),
            "scales": ("<f2", (table.rows,)),
        }

    def encode(self, rows: Array) -> dict[str, Array]:
        scales = np.abs(rows).max(axis=-1).astype(np.float16)
        steps = nonzero(scales)[:, None] / 127
        return {"values": codes(rows, steps, 127), "scales": scales}

    def decode(self, parts: Mapping[str, Array]) -> Array:
        scales = np.asarray(parts["scales"], np.float32) / 127
        rows: Array = parts["values"] * scales[..., None]
        return rows


class Int4(RowFormat):
    """Rows in 4 bits, with an fp16 scale for each 32 columns: a seventh of their largest magnitude.
    The last scale may cover fewer columns.

    A column is an integer from -7 to 7, in two's complement, times its scale. A byte holds two
    columns, the first in its low bits.
    """

    name = "int4"

    def stored(self, table: TablePlan) -> dict[str, tuple[str, tuple[int, ...]]]:
        if table.channels % 2:
            raise CetaneError(
                f"int4 rows have two columns in a byte, but a table has {table.channels} columns",
                "--set embedding.format=int8",
            )
        return {
            "values": ("|u1", (table.rows, table.channels // 2)),
            "scales": ("<f2", (table.rows, -(-table.channels // BLOCK))),
        }

    def encode(self, rows: Array) -> dict[str, Array]:
        starts = range(0, rows.shape[-1], BLOCK)
        scales = (np.maximum.reduceat(np.abs(rows), starts, axis=-1) / 7).astype(np.float16)
        bits = codes(rows, by_column(nonzero(scales), rows.shape[-1]), 7).view(np.uint8) & 15
        return {"values": bits[..., ::2] | bits[..., 1::2] << 4, "scales": scales}

    def decode(self, parts: Mapping[str, Array]) -> Array:
        values, scales = parts["values"], np.asarray(parts["scales"], np.float32)
        pairs = np.stack([values & 15, values >> 4], axis=-1).astype(np.int8)
        integers = (pairs.reshape(*values.shape[:-1], -1) ^ 8) - 8
        rows: Array = integers * by_column(scales, integers.shape[-1])
        return rows


def by_column(scales: Array, columns: int) -> Array:
    """The scale of every column, from a scale for each block."""
    return np.repeat(scales, BLOCK, axis=-1)[..., :columns]


def nonzero(scales: Array) -> Array:
    """Scales in fp32; 1 for rows or blocks of zeros."""
    return np.where(scales == 0, 1, scales).astype(np.float32)


def codes(rows: Array, steps: Array, most: int) -> Array:
    """The nearest multiples of some steps, from -most to most, as int8."""
    return np.clip(np.rint(rows / steps), -most, most).astype(np.int8)


ROW_FORMATS: dict[RowFormatName, RowFormat] = {
    each.name: each for each in (Halves(), Int8(), Int4())
}


class EncodedRows:
    """Rows `(V, C)` in a format, in memory or on disk. Each access decodes what it asks for."""

    def __init__(
        self, row_format: RowFormat, parts: Mapping[str, Array], shape: tuple[int, ...]
    ) -> None:
        self.row_format, self.parts, self.shape = row_format, parts, shape

    def __getitem__(self, tokens: Any) -> Array:
        return self.row_format.decode({name: array[tokens] for name, array in self.parts.items()})
