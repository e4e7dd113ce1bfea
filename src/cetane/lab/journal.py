"""The journal: every run's intent and outcome, and every verdict, one JSON object a line.

Lines are appended and synced. A run's intent is on disk before the run starts, and its outcome
after any end. `cetane.ledger` tells how it survives a power loss.
"""

import datetime
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cetane.lab.experiment import (
    ARMS,
    ArmName,
    Experiment,
    InputName,
    Limit,
    Status,
    bounds,
    within,
)
from cetane.ledger import Ledger
from cetane.validation import Data, Drawn

Ended = Literal["passed", "failed", "error", "interrupted"]
HINT = (
    "restore that line from a copy, or upgrade cetane if a newer one wrote it; only a broken last "
    "line is repaired automatically"
)
"""The advice in errors about a line."""


class Figure(Data):
    """A metric of an arm. `low` and `high` are quartiles of `n` measurements, or the interval of a
    prediction."""

    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    kind: Literal["measured", "predicted"] = "measured"
    n: int = 1
    note: str = ""


class ArmOutcome(Data):
    """The outcome of one arm."""

    artefact: str | None = None
    """Digest of the bundle."""
    recipe: str = ""
    """sha256 of the recipe."""
    metrics: dict[str, Figure] = Field(default_factory=dict)
    texts: dict[str, str] = Field(default_factory=dict)
    curves: dict[str, tuple[tuple[Drawn, Drawn], ...]] = Field(default_factory=dict)


class GateOutcome(Data):
    """A gate and its value. Without a value (None) it fails."""

    metric: str
    arm: Literal["candidate", "baseline", "ratio"]
    least: float | None = None
    most: float | None = None
    value: float | None
    passed: bool

    @model_validator(mode="after")
    def honest(self) -> "GateOutcome":
        """Refuse a verdict that its own figures contradict."""
        holds = self.value is not None and within(self.value, self.least, self.most)
        if self.passed != holds:
            raise ValueError(f"{self.limit}, found {self.value}: passed = {self.passed}")
        return self

    @property
    def limit(self) -> str:
        """The gate's bounds, in words."""
        return bounds(self.metric, self.arm, self.least, self.most)


class Intent(Data):
    """The event before a run starts."""

    event: Literal["intent"] = "intent"
    run: str
    experiment: str
    at: str
    experiment_sha256: str
    command: str
    recipes: dict[ArmName, str]
    machine: dict[str, str | int]
    versions: dict[str, str]
    inputs: dict[InputName, str] = Field(default_factory=dict)
    """The hashes of the model's content and of the text. Older lines have none."""

    def fits(self, experiment: Experiment) -> bool:
        """Whether the experiment, its recipes and its text are still those of this run."""
        return (
            self.experiment_sha256 == experiment.sha256
            and self.recipes == experiment.recipes_sha256
            and self.saw(experiment.inputs_sha256)
        )

    def saw(self, inputs: Mapping[InputName, str]) -> bool:
        """Whether this run had these inputs, as far as it noted them."""
        return all(self.inputs.get(name, digest) == digest for name, digest in inputs.items())


class Outcome(Data):
    """The event after a run has ended."""

    event: Literal["outcome"] = "outcome"
    run: str
    experiment: str
    at: str
    status: Ended
    seconds: float
    arms: dict[ArmName, ArmOutcome] = Field(default_factory=dict)
    gates: tuple[GateOutcome, ...] = ()
    surprise: str = ""
    lesson: str = ""
    next: str = ""
    error: str = ""

    @model_validator(mode="after")
    def honest(self) -> "Outcome":
        """Refuse a status without its figures, or against its gates, and a gate against them."""
        if self.status in ("passed", "failed"):
            if missing := [name for name in ARMS if name not in self.arms]:
                raise ValueError(f"{self.status}, without the figures of the {missing[0]}")
            if (self.status == "passed") != all(gate.passed for gate in self.gates):
                raise ValueError(f"{self.status}, which its gates contradict")
            for gate in self.gates:
                found = value_of(gate.metric, gate.arm, self.arms)
                if finite(gate.value) != finite(found):
                    raise ValueError(f"{gate.limit}: {gate.value}, where the arms have {found}")
        return self

    def judged_by(self, limits: Sequence[Limit]) -> bool:
        """Whether these limits are those of its gates, if it was judged at all."""
        asked = [(limit.metric, limit.of, limit.least, limit.most) for limit in limits]
        gates = [(gate.metric, gate.arm, gate.least, gate.most) for gate in self.gates]
        return self.status not in ("passed", "failed") or gates == asked


def value_of(
    metric: str, of: ArmName | Literal["ratio"], arms: Mapping[ArmName, ArmOutcome]
) -> float | None:
    """A metric of an arm, or the ratio of both arms; None if it is missing."""
    none = Figure(value=None)
    values = {name: arms[name].metrics.get(metric, none).value for name in ARMS}
    if of != "ratio":
        return values[of]
    ours, theirs = values["candidate"], values["baseline"]
    return None if ours is None or not theirs else ours / theirs


def finite(value: float | None) -> float | None:
    """A value as a line keeps it: JSON has neither infinity nor NaN."""
    return value if value is not None and math.isfinite(value) else None


class Verdict(Data):
    """The event of a decision about an experiment."""

    event: Literal["verdict"] = "verdict"
    experiment: str
    at: str
    status: Status
    reason: str
    obituary: str = ""


Event = Annotated[Intent | Outcome | Verdict, Field(discriminator="event")]


@dataclass(frozen=True)
class Run:
    """An intent and its outcome. The outcome is None while it runs, and stays None after a kill."""

    intent: Intent
    outcome: Outcome | None

    @property
    def status(self) -> Ended:
        return "interrupted" if self.outcome is None else self.outcome.status

    def fits(self, experiment: Experiment) -> bool:
        """Whether the experiment, its recipes, text and gates are still those of this run."""
        judged = self.outcome is None or self.outcome.judged_by(experiment.gates)
        return judged and self.intent.fits(experiment)


class Journal:
    """A journal file, which need not exist yet, on top of a base that is only read.

    Of the base, it has nothing about experiments that are `replaced` by others of the same id.
    """

    def __init__(
        self, path: Path, base: Path | None = None, replaced: Collection[str] = ()
    ) -> None:
        self._ledger: Ledger[Event] = Ledger(path, Event, HINT)
        self._base: Ledger[Event] | None = None if base is None else Ledger(base, Event, HINT)
        self._replaced = replaced
        self.path, self.broken = path, self._ledger.broken

    def events(self) -> list[Intent | Outcome | Verdict]:
        """All events in order, those of the base first. Raises CetaneError for a broken line,
        unless it is the last."""
        base = self._base.read() if self._base else []
        return [*(event for event in base if event.experiment not in self._replaced), *self.own()]

    def own(self) -> list[Intent | Outcome | Verdict]:
        """The events of this file, without the base."""
        return self._ledger.read()

    def append(self, event: Intent | Outcome | Verdict) -> None:
        """Add one line. Returns when it is on the disk."""
        self._ledger.append(event)

    def repair(self) -> int:
        """Set a broken last line aside. Returns its bytes; 0 if no line is broken."""
        return self._ledger.repair()

    def runs(self) -> dict[str, list[Run]]:
        """The runs of every experiment, in order."""
        events = self.events()
        ended = [event for event in events if isinstance(event, Outcome)]
        outcomes = {(event.run, event.experiment): event for event in ended}
        runs: dict[str, list[Run]] = {}
        for event in events:
            if isinstance(event, Intent):
                run = Run(event, outcomes.get((event.run, event.experiment)))
                runs.setdefault(event.experiment, []).append(run)
        return runs

    def verdicts(self) -> dict[str, Verdict]:
        """The last verdict on each experiment, if there is one."""
        return {event.experiment: event for event in self.events() if isinstance(event, Verdict)}


def now() -> str:
    """The current time in the journal's form."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def as_dict(event: Intent | Outcome | Verdict) -> dict[str, Any]:
    """An event as a JSON object."""
    return event.model_dump(mode="json")
