"""How long calls take, in milliseconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

from . import Json

WARM, SAMPLES, ENOUGH = 2, 200, 5.0
"""Predictions that are not counted; the most that are; and the seconds after which no further one
begins, if there are at least ten."""


def clocked(work: Callable[[], object]) -> float:
    """The milliseconds that some work takes."""
    started = time.perf_counter()
    work()
    return round(1e3 * (time.perf_counter() - started), 4)


def timed(work: Callable[[], object]) -> list[float]:
    """Milliseconds of single calls, after some that are not counted."""
    for _ in range(WARM):
        work()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < SAMPLES and (len(times) < 10 or time.perf_counter() - begun < ENOUGH):
        times.append(clocked(work))
    return times


def spread(times: list[float]) -> Json:
    """Median, 95th percentile, least and count of milliseconds."""
    ordered = sorted(times)
    return {
        "median_ms": round(median(ordered), 4),
        "p95_ms": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
        "min_ms": ordered[0],
        "count": len(ordered),
    }
