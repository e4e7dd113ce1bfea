"""Weights of products as a tape keeps them: rows of bytes, in the form nearest to the package's.

Linear weights of 8 and 4 bits lose nothing, nor do palettes where a product looks up floats. Where
it looks up words, entries are rounded to 14 bits. Weights with other palettes are rounded to 8
bits, with one scale for 32 inputs. These are palettes of more than 6 bits; without AVX-512 VNNI,
those of more than 4 bits; without AVX2, all of them. All other weights stay floats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from cetane.mil.constants import Constants
from cetane.mil.dtypes import Array
from cetane.mil.fast.dots import EIGHT, MOST_ENTRY, TILE
from cetane.mil.fast.emit import BLOCK, LANES
from cetane.mil.fast.forms import DOTTED, ENTRIES, READABLE, ROWS, WeightForm
from cetane.mil.program import Argument, Op

_LINEAR, _PALETTE = "constexpr_blockwise_shift_scale", "constexpr_lut_to_dense"
_NONE = np.empty((0, 0), np.float32)
GROUP = EIGHT if DOTTED else ROWS
"""Rows of a weight that have one palette."""


@dataclass(frozen=True)
class WeightRows:
    """A weight `(N, K)` in one form; K is padded with zeros to whole blocks.

    `data` (N, bytes of a row), uint8; integers and indices are bytes until they are grouped.
    `scale` (N,), float32, multiplies a row's results. `tables` are scales of blocks, float32
    (N, K'/32) for padded K', or palettes, uint8 (palettes, bytes of one). `palette_ids` (N/GROUP,),
    int32, is the number of the palette of each `GROUP` rows.
    """

    form: WeightForm
    data: Array
    scale: Array
    tables: Array
    palette_ids: Array

    def grouped(self) -> WeightRows:
        """The weight as products read it: with rows of zeros up to a multiple of `TILE` or `ROWS`,
        and the blocks of this many rows side by side."""
        size = TILE if self.form in DOTTED else ROWS
        scale = np.pad(self.scale, (0, -len(self.scale) % size))
        tables, palette_ids = self.tables, self.palette_ids
        if self.form in DOTTED:
            blocks = self.data.shape[1] // BLOCK
            palette_ids = np.pad(palette_ids, (0, len(palette_ids) % (TILE // EIGHT)), "edge")
            data = in_tiles(self.form, _filled(self.data, TILE))
        else:
            data = self.data if self.form is not WeightForm.NIBBLES else in_nibbles(self.data)
            blocks = data.shape[1] // self.form.bytes_of(BLOCK)
            data = _in_groups(data, blocks, ROWS)
        if self.form is WeightForm.SCALED_BYTES:
            tables = _in_groups(tables, blocks, size)
        return replace(self, data=data, scale=scale, tables=tables, palette_ids=palette_ids)


def rows_of(constants: Constants, weight: Argument) -> WeightRows:
    """A constant weight `(N, K, ...)` as rows."""
    op = constants.producer(weight)
    if op is not None and op.kind == "concat" and _below_each_other(constants, op):
        return _joined(constants, op)
    if op is not None and op.kind == _LINEAR:
        linear = _linear(constants, op)
        return linear or _floats(_matrix(constants.array(weight)))
    if op is not None and op.kind == _PALETTE:
        return _palettes(constants, op) or _rounded(_matrix(constants.array(weight)))
    return _floats(_matrix(constants.array(weight)))


def _linear(constants: Constants, op: Op) -> WeightRows | None:
    """A linear weight with a scale for each row or for blocks of inputs, in int8 if that holds its
    steps from zero; None for other forms of scales."""
    offset = constants.array(op.inputs["offset"][0]) if "offset" in op.inputs else None
    if offset is not None and offset.dtype.kind == "f":
        return None
    data = _matrix(constants.array(op.inputs["data"][0])).astype(np.int16)
    scale = constants.array(op.inputs["scale"][0]).astype(np.float32)
    rows, columns = data.shape
    if scale.shape[0] != rows or any(size != 1 for size in scale.shape[2:]):
        return None
    scale = scale.reshape(rows, -1)
    blocks = scale.shape[1]
    if offset is not None:
        zero = np.broadcast_to(offset.astype(np.int16).reshape(rows, -1), (rows, blocks))
        data = data - np.repeat(zero, columns // blocks, axis=1)
    narrow = data.min() >= -128 and data.max() <= 127
    if not narrow or (blocks > 1 and columns // blocks % BLOCK):
        return _floats(data * np.repeat(scale, columns // blocks, axis=1))
    if blocks > 1:
        wide = np.repeat(scale, columns // blocks // BLOCK, axis=1)
        return _bytes(WeightForm.SCALED_BYTES, data, np.ones(rows, np.float32), wide)
    if WeightForm.NIBBLES in READABLE and data.min() >= -8 and data.max() <= 7:
        palette = np.arange(-8, 8, dtype=np.float32)[None]
        palette_ids = np.zeros(-(-rows // GROUP), np.int32)
        return _looked_up(WeightForm.NIBBLES, data + 8, scale[:, 0], palette, palette_ids)
    return _bytes(WeightForm.BYTES, data, scale[:, 0], _NONE)


def _palettes(constants: Constants, op: Op) -> WeightRows | None:
    """Palettes of up to 6 bits, each of some rows; None for others."""
    if "shape" in op.inputs:  # the op of iOS 16
        return None
    table = constants.array(op.inputs["lut"][0])
    entries, width = table.shape[-2:]
    form = next((f for f in ENTRIES if f in READABLE and entries <= ENTRIES[f]), None)
    if form is None or width != 1:
        return None
    groups, *others = table.shape[:-2]
    indices = _matrix(constants.array(op.inputs["indices"][0]))
    each = len(indices) // groups
    if any(size != 1 for size in others) or (groups > 1 and each % GROUP):
        return None
    if indices.dtype.kind != "u" or indices.max(initial=0) >= entries:  # the decoder refuses these
        return None
    palette_ids = np.arange(0, len(indices), GROUP, dtype=np.int32) // np.int32(each)
    palettes: Array = table.reshape(groups, -1).astype(np.float32)
    scale: Array = np.ones(groups, np.float32)
    if form in DOTTED:
        bound = np.abs(palettes).max(-1)
        scale = np.where(bound > 0, bound, np.float32(1)) / np.float32(MOST_ENTRY)
        palettes = (palettes / scale[:, None]).astype(np.float32)
    return _looked_up(form, indices, np.repeat(scale, each), palettes, palette_ids)


def _looked_up(
    form: WeightForm, indices: Array, scale: Array, palettes: Array, palette_ids: Array
) -> WeightRows:
    """Weights by indices of palettes, float32 (palettes, entries); they become words in tiles."""
    whole = np.pad(palettes, ((0, 0), (0, ENTRIES[form] - palettes.shape[1])))
    # Padding meets inputs of zero. The row's last index brings in no new entry, such as infinity.
    data = _in_blocks(indices, mode="edge").astype(np.uint8)
    if form in DOTTED:
        whole = np.rint(whole).astype(np.int16)
        whole = np.tile(whole, 2) if form is WeightForm.NIBBLES else whole
    return WeightRows(form, data, scale, np.ascontiguousarray(whole).view(np.uint8), palette_ids)


def in_tiles(form: WeightForm, rows: Array) -> Array:
    """Rows of bytes (N, K), whole tiles and blocks, as products of words read them.

    A tile's blocks follow each other. A block has two halves of `EIGHT` rows. A half has eight
    vectors, each of four columns of all its rows. Bytes stay in this order; indices share words.
    Eight vectors of 4 bits fill two vectors, with four indices in a word. Eight vectors of 6 bits
    fill three: a word has two whole indices, and the seventh and eighth fill the bits left over.
    """
    tiles = rows.reshape(len(rows) // TILE, 2, EIGHT, -1, BLOCK // 4, 4).transpose(0, 3, 1, 4, 2, 5)
    vectors = tiles.reshape(*tiles.shape[:4], 4 * EIGHT)
    if form in (WeightForm.BYTES, WeightForm.SCALED_BYTES):
        packed = np.ascontiguousarray(vectors)
    else:
        v = [vectors[..., number, :].astype("<u2") for number in range(BLOCK // 4)]
        if form is WeightForm.NIBBLES:
            words = [a | b << 4 | c << 8 | d << 12 for a, b, c, d in (v[:4], v[4:])]
        else:
            words = [
                v[0] | v[1] << 6 | v[6] << 12,
                v[6] >> 4 | v[2] << 2 | v[3] << 8 | v[7] << 14,
                v[7] >> 2 | v[4] << 4 | v[5] << 10,
            ]
        packed = np.stack(words, axis=-2)
    result: Array = packed.view(np.uint8).reshape(len(rows), -1)
    return result


def in_nibbles(indices: Array) -> Array:
    """Indices `(N, K)` of 4 bits, two in a byte. Of two vectors, the first lies in the lower halves
    of the bytes, the second in the upper halves."""
    pairs = indices.reshape(len(indices), -1, 2, LANES)
    both: Array = pairs[:, :, 0] | pairs[:, :, 1] << 4
    return both.reshape(len(indices), -1)


def _rounded(values: Array) -> WeightRows:
    """A weight in 8 bits, symmetric, with a scale for each block."""
    blocks = _in_blocks(values).reshape(len(values), -1, BLOCK)
    scale = np.abs(blocks).max(-1) / np.float32(127)
    steps = np.rint(blocks / np.where(scale > 0, scale, 1)[..., None])
    ones = np.ones(len(values), np.float32)
    return _bytes(WeightForm.SCALED_BYTES, steps.reshape(len(values), -1), ones, scale)


def _bytes(form: WeightForm, steps: Array, scale: Array, tables: Array) -> WeightRows:
    data = np.ascontiguousarray(_in_blocks(steps).astype(np.int8)).view(np.uint8)
    return WeightRows(form, data, scale, tables, np.empty(0, np.int32))


def _floats(values: Array) -> WeightRows:
    """A weight as it is, in 16 bits if they hold it."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float16)
    form, kept = WeightForm.HALVES, narrow
    if not np.array_equal(narrow, values):
        form, kept = WeightForm.FLOATS, values.astype(np.float32)
    data = np.ascontiguousarray(_in_blocks(kept)).view(np.uint8)
    return WeightRows(form, data, np.ones(len(values), np.float32), _NONE, np.empty(0, np.int32))


def _below_each_other(constants: Constants, op: Op) -> bool:
    """Whether a concat adds rows to a weight."""
    plain = {name: constants.plain(op.inputs[name][0]) for name in ("axis", "interleave")
             if name in op.inputs}  # fmt: skip
    rank = len(constants.type(op.inputs["values"][0]).shape)
    return plain["axis"] % rank == 0 and not plain.get("interleave")


def _joined(constants: Constants, op: Op) -> WeightRows:
    """Weights of the same inputs, one below the other. Parts of several forms become floats."""
    names = op.inputs["values"]
    parts = [rows_of(constants, part) for part in names]
    whole = all(len(part.scale) % GROUP == 0 for part in parts[:-1])
    if len({part.form for part in parts}) > 1 or (parts[0].form in ENTRIES and not whole):
        return _floats(np.concatenate([_matrix(constants.array(part)) for part in names]))
    form = parts[0].form
    before = np.cumsum([0, *(len(part.tables) for part in parts)])
    palette_ids = [
        part.palette_ids + np.int32(first) for part, first in zip(parts, before, strict=False)
    ]
    data, scale, tables = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("data", "scale", "tables")
    )
    return WeightRows(form, data, scale, tables, np.concatenate(palette_ids))


def _filled(rows: Array, size: int) -> Array:
    """Rows (N, ...), and rows of zeros up to a whole number of `size`."""
    return np.pad(rows, ((0, -len(rows) % size), (0, 0)))


def _in_groups(rows: Array, blocks: int, size: int) -> Array:
    """Rows (N, ...) of so many blocks, with the first blocks of `size` rows, then the second."""
    filled = _filled(rows, size)
    parts = filled.reshape(len(filled) // size, size, blocks, -1)
    return np.ascontiguousarray(parts.swapaxes(1, 2)).reshape(filled.shape)


def _matrix(weight: Array) -> Array:
    return weight.reshape(*weight.shape[:2])


def _in_blocks(matrix: Array, mode: Literal["constant", "edge"] = "constant") -> Array:
    """A matrix whose rows are padded to whole blocks, with zeros or with their last element."""
    return np.pad(matrix, ((0, 0), (0, -matrix.shape[1] % BLOCK)), mode)
