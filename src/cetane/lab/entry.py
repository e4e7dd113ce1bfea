"""What is known of an experiment, as data: its file, its runs, and its verdict.

The Markdown log (`document.py`) and the HTML page (`cetane.report`) format this, no more.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from cetane.lab.experiment import ARMS, Arm, ArmName, Experiment, Report, Status, Workload
from cetane.lab.journal import (
    ArmOutcome,
    Figure,
    GateOutcome,
    Intent,
    Journal,
    Outcome,
    Run,
    Verdict,
)
from cetane.lab.metrics import METRICS, better
from cetane.validation import Data


class Compared(Data):
    """A metric of both arms."""

    metric: str
    about: str
    better: Literal["lower", "higher"]
    """Which direction is good."""
    unit: str
    baseline: Figure | None
    candidate: Figure | None
    ratio: float | None
    """Candidate to baseline."""
    longest: float
    """The end of the axis of both."""

    @property
    def shown(self) -> Figure:
        """The figure that says how the metric was taken: the candidate's, if it has one."""
        figure = self.candidate or self.baseline
        assert figure is not None
        return figure


class ArmCurve(Data):
    """Points `(x, y)` by arm."""

    name: str
    lines: dict[ArmName, tuple[tuple[float, float], ...]]


class ArmTexts(Data):
    """What the arms wrote; an arm that wrote nothing has no text."""

    name: str
    lines: dict[ArmName, str]


class RunRow(Data):
    """One run."""

    run: str
    at: str
    """When it started, UTC."""
    status: str
    seconds: float | None
    error: str


class LastRun(Data):
    """The run that the figures are from."""

    intent: Intent
    seconds: float
    bundles: dict[ArmName, str]
    """Digests of the bundles that were built."""


class ExperimentReport(Data):
    """Everything that is known of an experiment."""

    kind: Literal["experiment"] = "experiment"
    schema_version: Literal[2] = 2
    id: str
    title: str
    group: str
    date: str
    """Of the original."""
    original: Status
    """What the original came to."""
    status: Status
    """The last verdict's, or the original's where there is none."""
    state: str
    """How the last run ended."""
    runnable: bool
    sha256: str
    """Of what decides a run's outcome."""
    hypothesis: str
    expects: tuple[str, ...]
    design: str
    arms: dict[ArmName, Arm]
    workload: Workload | None
    predicts: bool
    """Whether it predicts the speed of the model that the workload stands for."""
    figures: tuple[Compared, ...]
    gates: tuple[GateOutcome, ...]
    texts: tuple[ArmTexts, ...]
    curves: tuple[ArmCurve, ...]
    surprise: str
    reported: tuple[Report, ...]
    differs: str
    unjudged: str
    lesson: str
    next: str
    verdict: Verdict | None
    decided: str
    """The verdict's day, UTC; empty without one."""
    obituary: str
    references: tuple[str, ...]
    last: LastRun | None
    runs: tuple[RunRow, ...]
    """The latest first."""


class Entry:
    """An experiment with its runs and its last verdict."""

    def __init__(self, experiment: Experiment, runs: list[Run], verdict: Verdict | None) -> None:
        self.experiment, self.runs, self.verdict = experiment, runs, verdict
        ended = [run for run in runs if run.status in ("passed", "failed")]
        self.last = ended[-1] if ended else None
        self.latest = runs[-1] if runs else None

    @property
    def status(self) -> Status:
        return self.verdict.status if self.verdict else self.experiment.status

    @property
    def outcome(self) -> Outcome | None:
        return self.last.outcome if self.last else None

    def state(self) -> str:
        """How its last run ended."""
        if not self.experiment.runnable:
            return "not built"
        return "not run" if self.latest is None else self.latest.status

    def report(self) -> ExperimentReport:
        """Everything that is known of it."""
        one, outcome = self.experiment, self.outcome
        return ExperimentReport(
            id=one.id,
            title=one.title,
            group=one.group,
            date=one.date.isoformat(),
            original=one.status,
            status=self.status,
            state=self.state(),
            runnable=one.runnable,
            sha256=one.sha256,
            hypothesis=one.hypothesis,
            expects=tuple(map(str, one.expects)),
            design=one.design,
            arms={name: one.arm(name) for name in ARMS} if one.runnable else {},
            workload=one.workload if one.runnable else None,
            predicts="predicted_ms" in one.metrics,
            figures=tuple(compared(outcome)) if outcome else (),
            gates=outcome.gates if outcome else (),
            texts=tuple(texts(outcome)) if outcome else (),
            curves=tuple(curves(outcome)) if outcome else (),
            surprise=outcome.surprise if outcome else "",
            reported=one.reported,
            differs=one.differs,
            unjudged=one.unjudged,
            lesson=one.lesson or (outcome.lesson if outcome else ""),
            next=one.next or (outcome.next if outcome else ""),
            verdict=self.verdict,
            decided=self.verdict.at[:10] if self.verdict else "",
            obituary=(self.verdict.obituary if self.verdict else "") or one.obituary,
            references=one.references,
            last=last_run(self.last.intent, outcome) if self.last and outcome else None,
            runs=tuple(run_row(run) for run in reversed(self.runs)),
        )


def entries(experiments: Iterable[Experiment], journal: Journal) -> list[Entry]:
    """The experiments with what a journal says of them."""
    runs, verdicts = journal.runs(), journal.verdicts()
    return [Entry(one, runs.get(one.id, []), verdicts.get(one.id)) for one in experiments]


def experiment_report(experiment: Experiment, journal: Journal) -> ExperimentReport:
    """Everything that is known of one experiment."""
    (entry,) = entries([experiment], journal)
    return entry.report()


def both(outcome: Outcome) -> list[ArmOutcome]:
    """Baseline and candidate; an arm that failed has nothing."""
    return [outcome.arms.get(name, ArmOutcome()) for name in ARMS]


def compared(outcome: Outcome) -> Iterator[Compared]:
    """Every metric of either arm."""
    first, second = both(outcome)
    for name in dict.fromkeys((*first.metrics, *second.metrics)):
        a, b = first.metrics.get(name), second.metrics.get(name)
        known = [figure for figure in (a, b) if figure is not None]
        ends = [end for f in known for end in (f.value, f.high) if end is not None]
        ratio = b.value / a.value if a and b and a.value and b.value is not None else None
        yield Compared(
            metric=name,
            about=METRICS[name].about if name in METRICS else "",
            better=better(name),
            unit=known[0].unit,
            baseline=a,
            candidate=b,
            ratio=ratio,
            longest=max(ends, default=0.0),
        )


def texts(outcome: Outcome) -> Iterator[ArmTexts]:
    """Texts by name, in the candidate's order; those of both arms together."""
    arms = dict(zip(ARMS, both(outcome), strict=True))
    for name in dict.fromkeys(name for arm in reversed(arms.values()) for name in arm.texts):
        lines = {word: arm.texts[name] for word, arm in arms.items() if name in arm.texts}
        yield ArmTexts(name=name, lines=lines)


def curves(outcome: Outcome) -> Iterator[ArmCurve]:
    """Curves by name; those of both arms in one picture."""
    arms = dict(zip(ARMS, both(outcome), strict=True))
    for name in dict.fromkeys(name for arm in arms.values() for name in arm.curves):
        lines = {word: arm.curves[name] for word, arm in arms.items() if name in arm.curves}
        yield ArmCurve(name=name, lines=lines)


def run_row(run: Run) -> RunRow:
    return RunRow(
        run=run.intent.run,
        at=run.intent.at[:16].replace("T", " "),
        status=run.status,
        seconds=run.outcome.seconds if run.outcome else None,
        error=run.outcome.error if run.outcome else "",
    )


def last_run(intent: Intent, outcome: Outcome) -> LastRun:
    bundles = {name: arm.artefact for name, arm in outcome.arms.items() if arm.artefact}
    return LastRun(intent=intent, seconds=outcome.seconds, bundles=bundles)
