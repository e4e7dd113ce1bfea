"""Attention outside of graphs: the keys that a call sees, and the kernel for them.

A graph would multiply with every slot of a cache. Here a call reads the slots that its mask shows,
in the caller's own arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import numpy.typing as npt

from cetane.mil.dtypes import Array
from cetane.threads import available

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class View:
    """A part of a function's input: `begin:end` of its first axis."""

    source: str
    begin: int
    end: int


Operand = str | View
"""The name of a value, or a part of one."""


def value_of(operand: Operand, values: Mapping[str, Array]) -> Array:
    """The array of an operand."""
    if isinstance(operand, str):
        return values[operand]
    return values[operand.source][operand.begin : operand.end]


HIDDEN = -3e4
"""A key is hidden unless its mask is larger: hosts hide keys with -4e4, others with minus infinity.
The exponential of its score is zero, so it is not read."""
SHARED = 1 << 22
"""The fewest multiplications for the scores of one call for which threads share its rows."""


@dataclass(frozen=True)
class AttentionStage:
    """An attention `softmax(rows @ keys + mask) @ values^T`: the names of its operands and result.

    `rows (1, H, R, D)`; `keys (1, H, D, S)` and `values (1, H, E, S)` are one value, or the past
    and the new columns. The mask's axes have these sizes or 1. `cap`, if it is positive, bounds
    scores: `cap * tanh(score / cap)`. `sinks (1, H, R, 1)` are scores of a key whose value is zero.
    With `exact`, no result depends on the order of keys, nor on the number of rows.
    """

    rows: Operand
    keys: tuple[Operand, ...]
    values: tuple[Operand, ...]
    mask: Operand
    result: str
    cap: float = 0.0
    sinks: Operand | None = None
    exact: bool = field(default=True, compare=False)
    """Functions that differ only in this still share their graphs."""

    def run(self, values: dict[str, Array], seen: dict[tuple[Operand, int], Array]) -> None:
        """Add the result `(1, H, R, E)` to a call's values.

        `seen` keeps the runs of `seen_runs` by mask and by the size of the first part of keys. One
        layer may have keys in one part where another has two.
        """
        rows, mask = value_of(self.rows, values)[0], value_of(self.mask, values)[0]
        keys = [value_of(part, values)[0] for part in self.keys]
        mixed = [value_of(part, values)[0] for part in self.values]
        key = self.mask, keys[0].shape[-1]
        if key not in seen:
            seen[key] = seen_runs(mask, [part.shape[-1] for part in keys])
        sinks = None
        if self.sinks is not None:
            sinks = np.broadcast_to(value_of(self.sinks, values)[0, ..., 0], rows.shape[:2])
        attend = by_kernel if self.exact else by_products
        result = attend(rows, keys, mixed, mask, seen[key], self.cap, sinks)
        values[self.result] = result[None]


def seen_runs(mask: Floats, sizes: list[int]) -> Array:
    """The runs of keys that some row of a mask `(H, R, S)` shows.

    Keys lie in parts of these sizes. A run is a part, a start and a stop in it, and the start in
    the mask.
    """
    shown: npt.NDArray[np.bool_] = np.any(mask > HIDDEN, axis=(0, 1))
    runs, begin = [], 0
    for part, size in enumerate(sizes):
        part_shown = np.concatenate([[False], shown[begin : begin + size], [False]])
        edges = np.flatnonzero(part_shown[1:] != part_shown[:-1])
        runs += [(part, a, b, begin + a) for a, b in edges.reshape(-1, 2).tolist()]
        begin += size
    return np.array(runs, np.int64).reshape(-1, 4)


def by_kernel(
    rows: Floats, keys: list[Floats], values: list[Floats], mask: Floats, runs: Array, cap: float,
    sinks: Floats | None,
) -> Floats:  # fmt: skip
    """Attention by `exact_attention`."""
    from cetane.mil.fast.exact_attention import attend_exactly  # numba takes a while to load

    results = np.empty((*rows.shape[:2], values[0].shape[1]), np.float32)
    given = [
        np.ascontiguousarray(a) for a in (rows, *_past_and_new(keys), *_past_and_new(values), mask)
    ]
    extra = np.ascontiguousarray(np.empty((0, 0), np.float32) if sinks is None else sinks)

    def attend(first: int, last: int) -> None:
        attend_exactly(*given, runs, np.float32(cap), extra, results, first, last)

    _share_rows(attend, rows, runs)
    return results


def by_products(
    rows: Floats, keys: list[Floats], values: list[Floats], mask: Floats, runs: Array, cap: float,
    sinks: Floats | None,
) -> Floats:  # fmt: skip
    """Attention by matrix products, which are faster for many rows."""
    spans = [(part, slice(a, b), slice(at, at + b - a)) for part, a, b, at in runs.tolist()]
    scores = np.concatenate([rows @ keys[part][..., span] for part, span, _ in spans], -1)
    if cap:
        scores = np.tanh(scores / np.float32(cap)) * np.float32(cap)
    scores += np.concatenate([mask[..., span] for _, _, span in spans], -1)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[..., None])
    np.exp(np.subtract(scores, top, out=scores), out=scores)
    total = scores.sum(-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks[..., None] - top)
    results = np.zeros((*rows.shape[:2], values[0].shape[1]), np.float32)
    begin = 0
    for part, span, _ in spans:
        weights = scores[..., begin : begin + span.stop - span.start]
        results += weights @ values[part][..., span].swapaxes(1, 2)
        begin += span.stop - span.start
    return results / total


def _past_and_new(parts: list[Floats]) -> list[Floats]:
    """Two parts of keys; the second may be empty."""
    return [*parts, np.empty((*parts[0].shape[:2], 0), np.float32)][:2]


def _share_rows(work: Callable[[int, int], None], rows: Floats, runs: Array) -> None:
    """Do the work on all rows of all heads, shared by threads if there is enough of it.

    Threads share rows, not heads: with three heads, one of two threads would wait for the other.
    """
    total, threads = len(rows) * rows.shape[1], available()
    if rows.size * int((runs[:, 2] - runs[:, 1]).sum()) < SHARED:
        work(0, total)
    else:
        cuts = [total * thread // threads for thread in range(threads + 1)]
        list(_pool(threads).map(work, cuts, cuts[1:]))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)
