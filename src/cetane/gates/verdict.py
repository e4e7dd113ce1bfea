"""A check: one row of a gate's verdict."""

from math import isfinite
from statistics import NormalDist

from cetane.validation import Data


class Check(Data):
    """One value and its limit. A share also has the interval of its true value."""

    name: str
    value: float
    limit: float
    passed: bool
    interval: tuple[float, float] | None = None

    @property
    def decided(self) -> bool:
        """Whether the limit is outside the interval, if there is one."""
        return self.interval is None or not self.interval[0] < self.limit <= self.interval[1]

    @property
    def between(self) -> str:
        """The interval in brackets, behind a value that is above its limit and yet fails."""
        return "" if self.interval is None else " ({:.3g} to {:.3g})".format(*self.interval)


def at_least(name: str, value: float, limit: float) -> Check:
    """A check that the value reaches the limit. NaN fails."""
    return Check(name=name, value=value, limit=limit, passed=value >= limit)


def at_most(name: str, value: float, limit: float) -> Check:
    """A check that the value does not exceed the limit. NaN and infinity fail; both are written as
    1e308, since JSON has neither."""
    shown = value if isfinite(value) else 1e308
    return Check(name=name, value=shown, limit=limit, passed=shown <= limit)


def share(name: str, hits: int, count: int, limit: float, confidence: float) -> Check:
    """A share of `count` positions. It passes if the low end of its interval passes."""
    low, high = wilson(hits, count, confidence)
    value = hits / count if count else 0.0
    return Check(name=name, value=value, limit=limit, passed=low >= limit, interval=(low, high))


def wilson(hits: int, count: int, confidence: float) -> tuple[float, float]:
    """Wilson's score interval of a share (E. B. Wilson, J. Am. Stat. Assoc. 22, 1927)."""
    if not count:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, spread = hits / count, z**2 / count
    middle = (p + spread / 2) / (1 + spread)
    half = z / (1 + spread) * (p * (1 - p) / count + spread / (4 * count)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
