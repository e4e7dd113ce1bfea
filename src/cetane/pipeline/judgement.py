"""What a candidate of a compression costs, and whether that leaves room to the gate's limits."""

from cetane.gates.verdict import Check
from cetane.validation import Data

MARGIN = 0.8
"""The part of a limit that a candidate may use up, since the gate judges another text."""


class Judgement(Data):
    """What a candidate costs, as the golden gate's checks."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check holds, with the margin."""
        return all(holds(check) for check in self.checks)

    def __str__(self) -> str:
        """The figures and their limits, in one line."""
        return ", ".join(map(shown, self.checks))

    @property
    def missed(self) -> str:
        """The figures that leave too little room, in one line."""
        return ", ".join(shown(check) for check in self.checks if not holds(check))


def shown(check: Check) -> str:
    """A figure, its interval if it has one, and its limit."""
    name = check.name.partition(": ")[2]
    return f"{name} {check.value:.3g}{check.between}, limit {check.limit:g}"


def holds(check: Check) -> bool:
    """Whether a check leaves room to its limit. The low end of a share's interval is room enough;
    other figures may use up `MARGIN` of the limit."""
    return check.passed if check.interval is not None else used(check) <= MARGIN


def used(check: Check) -> float:
    """The part of a limit that a figure uses up: 0 for a compression that costs nothing."""
    nothing = 1.0 if check.name.endswith("ratio") else 0.0
    return (check.value - nothing) / (check.limit - nothing)


def allowance(judgement: Judgement) -> float:
    """The factor, 1 at most, by which a compression's KL must shrink to hold the promise with the
    margin.

    Wrong choices grow with the root of the KL. Fewer of them narrow the interval too; that is left
    as room.
    """
    parts = [1.0]
    for check in judgement.checks:
        if check.interval is None:
            parts.append(MARGIN / max(used(check), MARGIN))
        else:
            wrong, reach = 1 - check.value, check.value - check.interval[0]
            most = min(MARGIN * (1 - check.limit), 1 - check.limit - reach)
            parts.append((max(most, 0.0) / max(wrong, 1e-9)) ** 2)
    return min(parts)
