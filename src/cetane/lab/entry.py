"""An experiment with its runs and its verdict, as data for reports.

The Markdown log (`document.py`) and the HTML page (`cetane.report`) only format this data.
"""

from collections.abc import Iterable, Iterator
from typing import Literal

from cetane.lab.experiment import ARMS, Arm, ArmName, Experiment, ReportedFigure, Status, Workload
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
    """The good direction."""
    unit: str
    baseline: Figure | None
    candidate: Figure | None
    ratio: float | None
    """The candidate's value divided by the baseline's."""
    longest: float
    """The end of the axis that both bars share."""

    @property
    def shown(self) -> Figure:
        """The figure that tells how the metric was taken: the candidate's, if it has one."""
        figure = self.candidate or self.baseline
        assert figure is not None
        return figure


class ArmCurve(Data):
    """The points `(x, y)` of a curve, by arm."""

    name: str
    lines: dict[ArmName, tuple[tuple[float, float], ...]]


class ArmTexts(Data):
    """The arms' texts. An arm that wrote nothing has none."""

    name: str
    lines: dict[ArmName, str]


class RunRow(Data):
    """One run."""

    run: str
    at: str
    """The start, in UTC."""
    status: str
    seconds: float | None
    error: str


class LastRun(Data):
    """The run that gave the figures."""

    intent: Intent
    seconds: float
    bundles: dict[ArmName, str]
    """Digests of the bundles that were built."""
    current: bool
    """Whether the experiment, its recipes, text and gates are still those of the run."""


class ExperimentReport(Data):
    """Everything that is known of an experiment."""

    kind: Literal["experiment"] = "experiment"
    schema_version: Literal[2] = 2
    lab: str = ""
    """The option by which commands find its lab, after a space; empty if none needs it."""
    id: str
    title: str
    group: str
    date: str
    """The original's date."""
    original: str
    """The original's status, in its own word."""
    status: Status
    """The last verdict's status; without a verdict, the experiment's."""
    state: str
    """The end of the last run, in a word."""
    runnable: bool
    sha256: str
    """sha256 of the fields that decide a run's outcome."""
    hypothesis: str
    expects: tuple[str, ...]
    design: str
    arms: dict[ArmName, Arm]
    workload: Workload | None
    predicts: bool
    """Whether it predicts the speed of the model that the workload represents."""
    figures: tuple[Compared, ...]
    gates: tuple[GateOutcome, ...]
    texts: tuple[ArmTexts, ...]
    curves: tuple[ArmCurve, ...]
    surprise: str
    reported: tuple[ReportedFigure, ...]
    differs: str
    unjudged: str
    lesson: str
    next: str
    verdict: Verdict | None
    decided: str
    """The verdict's day, in UTC; empty without a verdict."""
    decided_earlier: bool
    """Whether the verdict is older than the run that gave the figures."""
    obituary: str
    references: tuple[str, ...]
    last: LastRun | None
    runs: tuple[RunRow, ...]
    """All runs, the latest first."""


class Entry:
    """An experiment with its runs and its last verdict."""

    def __init__(self, experiment: Experiment, runs: list[Run], verdict: Verdict | None) -> None:
        self.experiment, self.runs, self.verdict = experiment, runs, verdict
        judged = [run for run in runs if run.status in ("passed", "failed")]
        self.judged = judged[-1] if judged else None  # the run that gave the figures
        self.latest = runs[-1] if runs else None

    @property
    def status(self) -> Status:
        return self.verdict.status if self.verdict else self.experiment.status

    @property
    def outcome(self) -> Outcome | None:
        return self.judged.outcome if self.judged else None

    @property
    def latest_current(self) -> bool:
        """Whether the experiment, its recipes, text and gates are still those of the latest run."""
        return self.latest is None or self.latest.fits(self.experiment)

    @property
    def judged_current(self) -> bool:
        """Whether they are still those of the run that gave the figures, if there is one."""
        return self.judged is None or self.judged.fits(self.experiment)

    @property
    def decided_earlier(self) -> bool:
        """Whether the verdict is older than the run that gave the figures."""
        return bool(self.verdict and self.judged and self.verdict.at < self.judged.intent.at)

    def state(self) -> str:
        """The end of its latest run, in a word."""
        if not self.experiment.runnable:
            return "not built"
        return "not run" if self.latest is None else self.latest.status

    def state_in_words(self) -> str:
        """The end of its latest run, and whether the experiment has changed since."""
        if self.latest_current:
            return self.state()
        known = not self.experiment.runnable or self.experiment.recipes_sha256
        return f"{self.state()}, {'changed since' if known else 'a recipe cannot be read now'}"

    def report(self, lab: str = "") -> ExperimentReport:
        """Everything that is known about it."""
        one, outcome = self.experiment, self.outcome
        return ExperimentReport(
            lab=lab,
            id=one.id,
            title=one.title,
            group=one.group,
            date=one.date.isoformat(),
            original=one.originally,
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
            decided_earlier=self.decided_earlier,
            obituary=(self.verdict.obituary if self.verdict else "") or one.obituary,
            references=one.references,
            last=self.last_run(),
            runs=tuple(run_row(run) for run in reversed(self.runs)),
        )

    def last_run(self) -> LastRun | None:
        """The run that gave the figures."""
        if self.judged is None or self.outcome is None:
            return None
        arms = self.outcome.arms
        return LastRun(
            intent=self.judged.intent,
            seconds=self.outcome.seconds,
            bundles={name: arm.artefact for name, arm in arms.items() if arm.artefact},
            current=self.judged_current,
        )


def entries(experiments: Iterable[Experiment], journal: Journal) -> list[Entry]:
    """The experiments, each with its runs and verdict in the journal."""
    runs, verdicts = journal.runs(), journal.verdicts()
    return [Entry(one, runs.get(one.id, []), verdicts.get(one.id)) for one in experiments]


def experiment_report(experiment: Experiment, journal: Journal, lab: str = "") -> ExperimentReport:
    """Everything that is known about one experiment. `lab` is the option by which commands find its
    lab, after a space."""
    (entry,) = entries([experiment], journal)
    return entry.report(lab)


def both(outcome: Outcome) -> list[ArmOutcome]:
    """Baseline and candidate; a failed arm is empty."""
    return [outcome.arms.get(name, ArmOutcome()) for name in ARMS]


def compared(outcome: Outcome) -> Iterator[Compared]:
    """Every metric that either arm has."""
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
    """Texts by name, in the candidate's order, each with both arms."""
    arms = dict(zip(ARMS, both(outcome), strict=True))
    for name in dict.fromkeys(name for arm in reversed(arms.values()) for name in arm.texts):
        lines = {word: arm.texts[name] for word, arm in arms.items() if name in arm.texts}
        yield ArmTexts(name=name, lines=lines)


def curves(outcome: Outcome) -> Iterator[ArmCurve]:
    """Curves by name, with both arms in one picture."""
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
