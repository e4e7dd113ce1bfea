"""Weights to constants: what each format's `encode` does with arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cetane.compress import kernels, palettes
from cetane.compress.encoded import Affine, Dense, Half, Palettized, largest_scale
from cetane.errors import CetaneError
from cetane.threads import over_rows

if TYPE_CHECKING:
    from cetane.compress.formats import Palette, Shape

Weight = npt.NDArray[np.float16] | npt.NDArray[np.float32]
Sensitivity = npt.NDArray[np.float32]


def dense(weight: Weight) -> Dense:
    """The weight in fp16."""
    return Dense(_to_half(weight))


def linear(weight: Weight, bits: int, scales: Shape, one: bool) -> Affine:
    """Integers of 8 or 4 bits with fp16 scales of shape `scales`; with `one`, a single one."""
    half, limit = _to_half(weight), np.float32(2 ** (bits - 1) - 1)
    blocks = scales[1] if half.ndim > 1 else 1
    rows = half.reshape(len(half) * blocks, -1).view(np.uint16)
    largest = np.empty(len(rows), dtype=np.uint16)
    over_rows(kernels.largest, rows, largest)
    if one:
        largest = largest.max(keepdims=True)
    scale = np.minimum(largest.view(np.float16) / np.float16(limit), largest_scale(int(limit)))
    data = np.empty(rows.shape, dtype=np.int8)
    by_row = np.broadcast_to(scale, len(rows)).astype(np.float32)
    over_rows(lambda *parts: kernels.linear(*parts, limit), rows, by_row, data)
    return Affine(data.reshape(half.shape), scale.reshape(scales), bits)


def palettized(weight: Weight, form: Palette, sensitivity: Sensitivity | None) -> Palettized:
    """Indices and palettes of a weight whose shape the format has checked."""
    half = _to_half(weight)
    if form.vector > 1:
        return _vectors(half, form, sensitivity)
    groups = half.reshape(form.groups(half.shape), -1)
    match form.mode:
        case "uniform":
            lut, indices = palettes.uniform(groups, form.bits)
        case "kmeans":
            lut, indices = palettes.kmeans(groups, form.bits)
        case "weighted":
            costs = _costs(sensitivity, half.shape, form.name).reshape(groups.shape)
            lut, indices = palettes.kmeans(groups, form.bits, costs)
    lut = lut.reshape(form.lut_shape(half.shape))
    return Palettized(indices.reshape(half.shape), lut, form.bits)


def _vectors(half: Half, form: Palette, sensitivity: Sensitivity | None) -> Palettized:
    """Palettes whose entries are vectors along the output channels. A vector's cost is the mean of
    its elements' costs; they are equal where costs are those of input channels."""
    outputs, *inner = half.shape
    groups, rows = form.groups(half.shape), outputs // form.vector
    cut = (groups, rows // groups, form.vector, -1)
    vectors = half.reshape(cut).transpose(0, 1, 3, 2).reshape(groups, -1, form.vector)
    costs = None
    if form.weighted:
        counts = _costs(sensitivity, half.shape, form.name)
        costs = np.ascontiguousarray(counts.reshape(cut).mean(2).reshape(groups, -1))
    lut, indices = palettes.of_vectors(np.ascontiguousarray(vectors), form.index_bits, costs)
    lut = lut.reshape(form.lut_shape(half.shape))
    return Palettized(indices.reshape(rows, *inner), lut, form.index_bits)


def _costs(sensitivity: Sensitivity | None, shape: Shape, name: str) -> Sensitivity:
    """The factor for each element's squared error; CetaneError if missing or wrong."""
    if sensitivity is None:
        raise CetaneError(
            f"{name} needs sensitivities",
            "set compression.sensitivity to the file that `cetane sweep` writes",
        )
    try:
        costs = np.broadcast_to(sensitivity, shape)
    except ValueError as error:
        raise CetaneError(
            f"sensitivities of shape {sensitivity.shape} do not fit a weight of shape {shape}"
        ) from error
    if not (sensitivity >= 0).all() or not np.isfinite(sensitivity).all():
        raise CetaneError(
            "a sensitivity is negative or not finite",
            "measure them again: cetane sweep writes the file",
        )
    return np.ascontiguousarray(costs, dtype=np.float32)


def _to_half(weight: Weight) -> Half:
    """The weight in fp16 and C order; the same array if it is so already."""
    with np.errstate(over="ignore"):
        half = np.asarray(weight, dtype=np.float16, order="C")
    # These patterns and all above are infinite or NaN. numpy's isfinite is 25 times slower.
    positive, negative = half.view(np.int16).max(initial=0), half.view(np.uint16).max(initial=0)
    if positive >= 0x7C00 or negative >= 0xFC00:
        raise CetaneError(f"a weight of {np.abs(weight).max():g} is not finite in fp16")
    return half
