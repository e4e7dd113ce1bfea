"""The gates' verdicts, as data."""

from typing import Literal

from cetane.gates.verdict import Check
from cetane.validation import Data

OutcomeWord = Literal["passed", "failed", "not run"]


class GateVerdict(Data):
    """A gate's verdict on the bundle."""

    gate: str
    question: str
    outcome: OutcomeWord
    basis: str
    """`measured` on the programs, or `predicted` by rules."""
    command: str
    """The command that runs it."""
    repeatable: bool
    """Whether the command judges this bundle again. Others judge a bundle while they make it."""
    date: str | None = None
    """The time of its result, in UTC."""
    notes: tuple[str, ...] = ()
    held: int = 0
    """The number of checks that passed."""
    count: int = 0
    checks: tuple[Check, ...] = ()
