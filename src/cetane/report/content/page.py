"""The page of a bundle, as data."""

from typing import Literal

from cetane.report.content.developers import ForDevelopers
from cetane.report.content.figures import DiskUse, Perplexity, Positions, Ranges, Tasks
from cetane.report.content.placement import Residency
from cetane.report.content.speed import CallTimes, DraftBench, OnDevice
from cetane.report.content.sweep import SweepQuality
from cetane.report.content.verdicts import GateVerdict, OutcomeWord
from cetane.validation import Data


class Absent(Data):
    """A section without data, and the command that makes it."""

    kind: Literal["absent"] = "absent"
    why: str
    command: str


class Fact(Data):
    """A line of provenance."""

    name: str
    value: str


class KeyFigure(Data):
    """A large figure at the top of a page."""

    name: str
    value: float
    unit: str
    basis: Literal["measured", "predicted"]
    better: Literal["lower", "higher"]
    limit: float | None = None
    """The limit of its gate, in the same unit; None without a gate."""
    low: float | None = None
    high: float | None = None
    """The interval of a prediction or of a share."""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value is within its limit, with all of its interval; None without a limit."""
        if self.limit is None:
            return None
        if self.better == "higher":
            return (self.value if self.low is None else self.low) >= self.limit
        return (self.value if self.high is None else self.high) <= self.limit


class BundleReport(Data):
    """The page of a bundle."""

    kind: Literal["bundle"] = "bundle"
    schema_version: Literal[3] = 3
    title: str
    """The model's name."""
    date: str
    """The day on which the bundle was judged, else written; in UTC."""
    folder: str
    architecture: str
    recipe: str
    outcome: OutcomeWord
    figures: tuple[KeyFigure, ...]
    verdicts: tuple[GateVerdict, ...]
    residency: Residency
    positions: Positions | Absent
    ranges: Ranges | Absent
    sizes: DiskUse
    developers: ForDevelopers
    perplexity: Perplexity | Absent
    tasks: Tasks | Absent
    quality: SweepQuality | Absent
    speculation: DraftBench | Absent
    predicted: CallTimes | Absent
    device: OnDevice | Absent
    provenance: tuple[Fact, ...]
