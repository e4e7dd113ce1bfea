"""The gap between a tensor and its truth: relative error, worst element, overflow."""

from dataclasses import dataclass
from math import inf, nan

import numpy as np

from cetane.mil.dtypes import Array


@dataclass(frozen=True)
class Gap:
    """The difference of one tensor from the truth."""

    relative: float
    """Norm of the difference over the norm of the truth; for integers and booleans, the share that
    differs. Infinite if the shapes differ, if the truth is all zeros, or if an element is infinite
    or NaN in only one of the two."""
    largest: float
    """Largest absolute difference."""
    cosine: float
    """Cosine of the two; NaN if one of them is all zeros, or if the shapes differ."""
    worst: tuple[int, ...]
    """Index of the element that differs most."""
    values: tuple[float, float]
    """The true value of that element, and its value."""
    overflowed: int = 0
    """Elements that are infinite or NaN although the truth is finite."""
    vanished: float = 0.0
    """Share of the truth's nonzero elements that have become zero."""
    unknown: float = 0.0
    """Share of the truth's elements that are NaN, of which nothing can be said."""


def gap(truth: Array, result: Array) -> Gap:
    """Compare two arrays in float64; infinities and NaNs in the same places are equal."""
    if truth.shape != result.shape:
        return Gap(inf, inf, nan, (), (nan, nan))
    if truth.size == 0:
        return Gap(0.0, 0.0, nan, (), (nan, nan))
    a, b = truth.astype(np.float64), result.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        difference = np.where(same, 0.0, np.abs(a - b))
    difference[np.isnan(difference)] = inf
    place = np.unravel_index(difference.argmax(), a.shape)
    finite = np.isfinite(a) & np.isfinite(b)
    norms = np.linalg.norm(a[finite]), np.linalg.norm(b[finite])
    product = float(norms[0] * norms[1])
    if truth.dtype.kind in "biu":
        relative = float(1 - same.mean())
    elif not difference.any():
        relative = 0.0
    elif norms[0] == 0 or not np.isfinite(difference).all():
        relative = inf
    else:
        relative = float(np.linalg.norm(difference) / norms[0])
    nonzero = a != 0
    return Gap(
        relative=relative,
        largest=float(difference.max()),
        cosine=float(a[finite] @ b[finite]) / product if product else nan,
        worst=tuple(map(int, place)),
        values=(float(a[place]), float(b[place])),
        overflowed=int((np.isfinite(a) & ~np.isfinite(b)).sum()),
        vanished=float((b[nonzero] == 0).mean()) if nonzero.any() else 0.0,
        unknown=float(np.isnan(a).mean()),
    )
