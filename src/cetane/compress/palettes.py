"""Palettes: the 2**bits fp16 values that replace a group of weights, and how they are chosen."""

import numpy as np
import numpy.typing as npt

from cetane.compress.encoded import Half
from cetane.errors import CetaneError
from cetane.threads import over_rows

Indices = npt.NDArray[np.uint8]
Costs = npt.NDArray[np.float32]
SEED = 1
"""The seed of the draws that place the first entries of vector palettes."""
LEAST = 1e-4
"""The least cost of a weight, as a fraction of the mean cost in its matrix."""


def uniform_lut(low: Half, high: Half, bits: int) -> Half:
    """Evenly spaced palettes from `low` to `high`, both (groups, 1): fp16 (groups, 2**bits).

    The spacing is rounded to fp16 first, as coremltools does, so the last entry can miss `high`
    by a little. An entry is infinite where the span is beyond fp16.
    """
    last = 2**bits - 1
    with np.errstate(over="ignore", invalid="ignore"):
        spacing = (high - low) / np.float16(last)
        lut = np.arange(last + 1) * spacing.astype(np.float64) + low.astype(np.float64)
        return lut.astype(np.float16)


def uniform(groups: Half, bits: int) -> tuple[Half, Indices]:
    """Evenly spaced palettes for the rows of `groups` (fp16, one group a row).

    Returns the look-up tables, fp16 (groups, 2**bits), and uint8 indices shaped like `groups`.
    Bit for bit equal to coremltools' mode "uniform", which computes in fp16. Raises CetaneError for
    a group that spans more than fp16 can hold.
    """
    from cetane.compress import kernels  # here because numba takes a while to load

    low, high = _extremes(groups)
    lut = uniform_lut(low, high, bits)
    if not np.isfinite(lut).all():
        raise CetaneError(
            f"weights from {low.min():g} to {high.max():g}: their span exceeds fp16, "
            "so a uniform palette has no spacing",
            "use a kmeans palette",
        )
    indices = np.empty(groups.shape, dtype=np.uint8)
    last = np.float32(2**bits - 1)
    over_rows(
        lambda *rows: kernels.uniform(*rows, last),
        groups.view(np.uint16),
        low[:, 0].astype(np.float32),
        (high - low)[:, 0].astype(np.float32),
        indices,
    )
    return lut, indices


def kmeans(groups: Half, bits: int, costs: Costs | None = None) -> tuple[Half, Indices]:
    """The palettes of least squared error for the rows of `groups` (fp16, one group a row).

    `costs`, shaped like `groups`, multiply the squared error of each weight; by default all are
    equal. Returns the look-up tables, fp16 (groups, 2**bits) and ascending, and uint8 indices
    shaped like `groups`. Deterministic, and never worse than the uniform palette. For 1024 distinct
    values or fewer it is exact, up to fp16's rounding. For more it was measured within 0.1 % of the
    least error.
    """
    from cetane.compress import clusters

    evenly = uniform_lut(*_extremes(groups), bits).astype(np.float32)
    lut = np.empty(evenly.shape, dtype=np.float32)
    indices = np.empty(groups.shape, dtype=np.uint8)
    counted = np.empty((len(groups), 0), dtype=np.float32) if costs is None else _above_zero(costs)
    over_rows(clusters.kmeans, groups.view(np.uint16), counted, evenly, lut, indices)
    return lut.astype(np.float16), indices


def of_vectors(vectors: Half, bits: int, costs: Costs | None = None) -> tuple[Half, Indices]:
    """Palettes for groups of vectors, fp16 `(groups, N, V)`, by k-means (greedy k-means++, then
    Lloyd).

    `costs (groups, N)` multiply the squared error of each vector. Returns fp16 entries `(groups,
    2**bits, V)` and uint8 indices `(groups, N)`. Deterministic.
    """
    from cetane.compress import vectors as loops

    groups, count, length = vectors.shape
    values = vectors.astype(np.float32)
    counted = np.ones((groups, count), np.float32) if costs is None else _above_zero(costs)
    entries = np.empty((groups, length, 2**bits), dtype=np.float32)
    draws = np.random.default_rng(SEED).random((2**bits, loops.TRIALS))
    over_rows(lambda *rows: loops.place(*rows, draws), values, counted, entries)
    rounded = entries.astype(np.float16)
    indices = np.empty((groups, count), dtype=np.uint8)
    over_rows(loops.choose, values, rounded.astype(np.float32), indices)
    return np.ascontiguousarray(rounded.transpose(0, 2, 1)), indices


def _above_zero(costs: Costs) -> Costs:
    """Costs divided by their mean, and at least `LEAST`: a sum would lose smaller ones."""
    mean = costs.mean(dtype=np.float64)
    if not mean:
        return np.ones(costs.shape, dtype=np.float32)
    return np.maximum(costs / np.float32(mean), np.float32(LEAST), dtype=np.float32)


def _extremes(groups: Half) -> tuple[Half, Half]:
    """The least and the greatest value of each row, both (groups, 1)."""
    from cetane.compress import kernels

    low, high = np.empty((2, len(groups), 1), dtype=np.uint16)
    over_rows(kernels.extremes, groups.view(np.uint16), low[:, 0], high[:, 0])
    return low.view(np.float16), high.view(np.float16)
