"""The times of calls: how they are measured, and their recent medians."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

from cetane.engine.session import Session

RECENT = 15
"""The number of measurements in a median."""
LEAST = 3
"""The least number of measurements of a call before the first draft."""
MEASURING = 0.5
"""Seconds that further measurements may take, up to `RECENT` of them. On a shared machine, the
median of three was once 3.0 plain steps in place of 2.0, so nothing was drafted."""


class RecentMedian:
    """The median of recent measurements, which one outlier does not move."""

    def __init__(self, *measured: float) -> None:
        self.recent: deque[float] = deque(measured, maxlen=RECENT)
        self.usual = median(self.recent) if measured else 0.0
        """The median; 0 before the first measurement. It is kept, since a step reads it twenty
        times and changes it once."""

    def add(self, measured: float) -> None:
        self.recent.append(measured)
        self.usual = median(self.recent)


def measure_calls(session: Session, tokens: int, least: int = LEAST) -> dict[int, list[float]]:
    """Seconds of calls of every width, up to the narrowest that takes `tokens` tokens. Where a call
    costs by its tokens (`Session.counts`), each number of them is a width.

    `session` must be new; its calls are evaluated and never accepted. `least` guards against times
    that are too long by chance. The controller makes no call that seems dear, so nothing would
    correct its time.
    """

    def call(width: int) -> None:
        session.evaluate([token % session.plan.vocab for token in range(width)])

    return timed(session.counts(tokens), call, least)


def timed(
    widths: Iterable[int], call: Callable[[int], object], least: int = LEAST
) -> dict[int, list[float]]:
    """Seconds of `call` at each width: after an uncounted one, of `least` calls, and of more within
    `MEASURING` seconds."""
    times: dict[int, list[float]] = {width: [] for width in widths}
    spent = 0.0
    for count in range(1 + max(least, RECENT)):
        if count > least and spent > MEASURING:
            break
        for width, seconds in times.items():
            started = time.perf_counter()
            call(width)
            took = time.perf_counter() - started
            if count:
                seconds.append(took)
                spent += took
    return times
