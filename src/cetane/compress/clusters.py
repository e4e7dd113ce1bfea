"""k-means in one dimension on a histogram of fp16 weights, compiled by numba.

Weights are bit patterns in uint16, because numba has no fp16 on CPUs. Import this module only to
encode, as `kernels` says. Nothing here calls `kernels`: numba's cache would not see it change.
"""

import math

import numpy as np
from numba import njit, types

_PATTERNS = 0x10000
_POINTS = 1024  # points of the first pass, if these are 8 for each entry or more
_REACH = 8  # points that a cut may first move each way
_CUBE_ROOT = 0x2A9F789300000000  # 2/3 of float64's bias, less a term that evens out the error

# Declared types: else numba would compile everything again for a read-only or unaligned array.
_Weights = types.Array(types.uint16, 2, "C", readonly=True, aligned=False)
_Palettes = types.Array(types.float32, 2, "C", readonly=True)
_Costs = types.Array(types.float32, 2, "C", readonly=True)


@njit
def _compact(histogram, present, values, counts):  # type: ignore[no-untyped-def]
    """Fill the distinct finite values, ascending, with their bit patterns (`present`) and counts.

    Returns how many there are, and empties `histogram`. -0.0 is counted as 0.0.
    """
    histogram[0] += histogram[0x8000]
    histogram[0x8000] = 0
    distinct = 0
    for order in range(-0x7BFF, 0x7C00):
        pattern = order if order >= 0 else 0x8000 - order
        # Always stored, and kept if its count is not zero: a branch is often mispredicted.
        present[distinct] = pattern
        # fp16's exponent and mantissa move to their places in float64; then the bias is mended.
        magnitude = np.int64(abs(order) << 42).view(np.float64) * 2.0**1008
        values[distinct] = math.copysign(magnitude, order)
        counts[distinct] = histogram[pattern]
        distinct += histogram[pattern] > 0
        histogram[pattern] = 0
    return distinct


@njit
def _prefix_sums(values, counts, sums):  # type: ignore[no-untyped-def]
    """Fill the sums of counts, counts · values and counts · values² before each value.

    The sums start at the value zero, not at the least: an outlier would swallow small values.
    """
    middle = np.searchsorted(values, 0.0)
    sums[:, middle] = 0
    for i in range(middle, len(values)):
        sums[0, i + 1] = sums[0, i] + counts[i]
        sums[1, i + 1] = sums[1, i] + counts[i] * values[i]
        sums[2, i + 1] = sums[2, i] + counts[i] * values[i] * values[i]
    for i in range(middle - 1, -1, -1):
        sums[0, i] = sums[0, i + 1] - counts[i]
        sums[1, i] = sums[1, i + 1] - counts[i] * values[i]
        sums[2, i] = sums[2, i + 1] - counts[i] * values[i] * values[i]


@njit
def _points(values, counts, most):  # type: ignore[no-untyped-def]
    """Cut the values into at most `most` runs of neighbours, called points.

    Returns the start of each run, and the end of the last.
    """
    distinct = len(values)
    if distinct <= most:
        return np.arange(distinct + 1)
    # A point density ∝ (weight density)^(1/3) is best for squared error, and isolates outliers.
    density = np.empty(distinct)
    for i in range(distinct):
        left, right = max(i - 1, 0), min(i + 1, distinct - 1)
        gap = (values[right] - values[left]) / (right - left)
        # A third of the bits gives the cube root within 4 %, in a tenth of the time.
        cube = np.float64(counts[i] * gap * gap)
        density[i] = np.int64(cube.view(np.int64) // 3 + _CUBE_ROOT).view(np.float64)
    # A value needs at most one point. Without this cap, outliers would take all points.
    point = density.sum() / most
    while density.max() > 2 * point:
        density = np.minimum(density, point)
        point = density.sum() / most
    starts = np.empty(most + 1, dtype=np.int64)
    count, share, target = 0, 0.0, 0.0
    for i in range(distinct):
        share += density[i]
        if share >= target and count < most:
            starts[count] = i
            count += 1
            target = (np.floor(share / point) + 1) * point
    starts[count] = distinct
    return starts[: count + 1]


@njit(inline="always")
def _error(sums, start, end):  # type: ignore[no-untyped-def]
    """The squared error of a cluster of values around their mean."""
    total = sums[1, end] - sums[1, start]
    return sums[2, end] - sums[2, start] - total * total / (sums[0, end] - sums[0, start])


@njit
def _cut(sums, low, high, cuts):  # type: ignore[no-untyped-def]
    """Fill `cuts` with the clusters of least squared error; cluster j is `cuts[j]:cuts[j + 1]`.

    Every cut lies between `low` and `high`, which both ascend strictly. This is a dynamic programme
    over clusters. The best start of the last cluster ascends with its end and with the number of
    clusters. So ends that are already solved bound the search for the ends between them.
    """
    size = len(cuts) - 1
    width = (high - low).max() + 1
    starts = np.empty((size + 1, width), dtype=np.int32)
    errors, shorter = np.empty(width), np.empty(width)
    starts[1] = 0
    for end in range(low[1], high[1] + 1):
        errors[end - low[1]] = _error(sums, 0, end)
    for j in range(2, size + 1):
        errors, shorter = shorter, errors
        ends = high[j] - low[j] + 1
        step = 1
        while 2 * step <= ends:
            step *= 2
        while step >= 1:
            for k in range(step - 1, ends, 2 * step):
                end = low[j] + k
                first, last = low[j - 1], min(high[j - 1], end - 1)
                if k >= step:
                    first = max(first, starts[j, k - step])
                if k + step < ends:
                    last = min(last, starts[j, k + step])
                if end <= high[j - 1]:
                    first = max(first, starts[j - 1, end - low[j - 1]])
                least, at = np.inf, min(first, last)
                for start in range(at, last + 1):
                    error = shorter[start - low[j - 1]] + _error(sums, start, end)
                    if error < least:
                        least, at = error, start
                errors[k] = least
                starts[j, k] = at
            step //= 2
    cuts[0], cuts[size] = 0, high[size]
    for j in range(size, 1, -1):
        cuts[j - 1] = starts[j, cuts[j] - low[j]]


@njit
def _nearest_half(x):  # type: ignore[no-untyped-def]
    """A float64 inside fp16's range, rounded to fp16, ties to even."""
    step = math.ldexp(1.0, max(math.frexp(x)[1], -13) - 11)
    return np.rint(x / step) * step


@njit
def _centroids(values, counts, entries):  # type: ignore[no-untyped-def]
    """Fill `entries` with the means of the best clusters of ascending values, rounded to fp16.

    Exact k-means on all ~13,000 distinct values of a group takes 40 ms at 4 bits. So a first pass
    clusters points, at least 8 a cluster. A second pass clusters all values, and keeps each cut
    within a few points of its place; a cut that wants to go farther gets more. Measured at 4 bits,
    this was no worse than coremltools' exact k-means in any of 116 groups of 65,536.
    """
    size, distinct = len(entries), len(values)
    sums = np.empty((3, distinct + 1))
    _prefix_sums(values, counts, sums)
    starts = _points(values, counts, max(_POINTS, 8 * size))
    points = len(starts) - 1
    low, high, cuts = np.zeros((3, size + 1), dtype=np.int64)
    for j in range(size + 1):
        low[j], high[j] = j, points - size + j
    low[size], high[0] = points, 0
    coarse = np.empty((3, points + 1))
    for i in range(points + 1):
        coarse[:, i] = sums[:, starts[i]]
    _cut(coarse, low, high, cuts)
    near = cuts.copy()
    for j in range(size + 1):
        cuts[j] = starts[near[j]]
    reach, settled = _REACH, points == distinct
    while not settled:
        for j in range(1, size):
            low[j] = starts[max(near[j] - reach, j)]
            high[j] = starts[min(near[j] + reach, points - size + j)]
        low[size] = high[size] = distinct
        _cut(sums, low, high, cuts)
        settled = True
        for j in range(1, size):
            settled &= cuts[j] > low[j] or low[j] == starts[j]
            settled &= cuts[j] < high[j] or high[j] == starts[points - size + j]
        reach *= 2
    for j in range(size):
        count = sums[0, cuts[j + 1]] - sums[0, cuts[j]]
        entries[j] = _nearest_half((sums[1, cuts[j + 1]] - sums[1, cuts[j]]) / count)


@njit(inline="always")
def _is_past(value, entries, entry):  # type: ignore[no-untyped-def]
    """Whether a value is nearer to the next entry than to this one; entries ascend."""
    return entry + 1 < len(entries) and (
        2 * value > np.float64(entries[entry]) + np.float64(entries[entry + 1])
    )


@njit
def _squared_error(values, counts, entries):  # type: ignore[no-untyped-def]
    """The squared error of values, each at its nearest entry; values and entries ascend."""
    entry, error = 0, 0.0
    for i in range(len(values)):
        while _is_past(values[i], entries, entry):
            entry += 1
        error += counts[i] * (values[i] - entries[entry]) ** 2
    return error


@njit(types.void(_Weights, _Costs, _Palettes, types.float32[:, ::1], types.uint8[:, ::1]),
      nogil=True, cache=True)  # fmt: skip
def kmeans(weights, costs, evenly, lut, indices):  # type: ignore[no-untyped-def]
    """Fill, for each row, the palette of least squared error and the `indices` into it.

    A palette is a row of `lut`: fp16 values, ascending.

    `costs` multiply the squared error of each weight; they are above zero, and have no columns if
    all are equal. `evenly` holds evenly spaced palettes, which a row takes where they are better.
    """
    size = lut.shape[1]
    histogram = np.zeros(_PATTERNS)
    present = np.empty(_PATTERNS, dtype=np.uint16)
    values = np.empty(_PATTERNS)
    counts = np.empty(_PATTERNS)
    index_of = np.empty(_PATTERNS, dtype=np.uint8)
    for row in range(len(weights)):
        if costs.shape[1]:
            for column in range(weights.shape[1]):
                histogram[weights[row, column]] += costs[row, column]
        else:
            for pattern in weights[row]:
                histogram[pattern] += 1
        distinct = _compact(histogram, present, values, counts)
        entries = lut[row]
        if distinct <= size:
            entries[:distinct] = values[:distinct]
            entries[distinct:] = values[distinct - 1]
        else:
            v, c = values[:distinct], counts[:distinct]
            _centroids(v, c, entries)
            # Means lose a little when they are rounded to fp16: even spacing can then be better.
            if _squared_error(v, c, evenly[row]) < _squared_error(v, c, entries):
                entries[:] = evenly[row]
        entry = 0
        for i in range(distinct):
            while _is_past(values[i], entries, entry):
                entry += 1
            index_of[present[i]] = entry
        index_of[0x8000] = index_of[0]
        for column in range(weights.shape[1]):
            indices[row, column] = index_of[weights[row, column]]
