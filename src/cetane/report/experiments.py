"""The content of an experiment's page: from its file, and what the journal says of it."""

from collections.abc import Iterator

from cetane.lab.document import Entry
from cetane.lab.experiment import ARMS, Experiment
from cetane.lab.journal import ArmOutcome, Journal, Outcome, Run
from cetane.lab.journal import Figure as Measured
from cetane.lab.metrics import METRICS
from cetane.report.content import (
    Absent,
    Compared,
    Curve,
    ExperimentReport,
    Fact,
    GateValue,
    Reported,
    RunRow,
    Text,
    Value,
)


def experiment_report(experiment: Experiment, journal: Journal) -> ExperimentReport:
    """Everything known of an experiment."""
    runs = journal.runs().get(experiment.id, [])
    verdict = journal.verdicts().get(experiment.id)
    entry = Entry(experiment, runs, verdict)
    outcome = entry.outcome
    return ExperimentReport(
        title=experiment.title,
        subtitle=f"{experiment.id}, {experiment.group}, {experiment.date.isoformat()}",
        status=entry.status,
        outcome=entry.state(),
        hypothesis=experiment.hypothesis,
        expects=tuple(map(str, experiment.expects)),
        decided=verdict.reason if verdict else "",
        decide=f"cetane lab verdict {experiment.id} STATUS --reason REASON",
        obituary=(verdict.obituary if verdict else "") or experiment.obituary,
        remarks=remarks(experiment, outcome),
        reported=tuple(Reported(**report.model_dump()) for report in experiment.reported),
        figures=tuple(compared(outcome)) if outcome else absent(experiment),
        gates=tuple(GateValue(**gate.model_dump()) for gate in outcome.gates) if outcome else (),
        texts=tuple(texts(outcome)) if outcome else (),
        curves=tuple(curves(outcome)) if outcome else (),
        runs=tuple(run_row(run) for run in reversed(runs)),
        provenance=tuple(provenance(experiment, entry.last)),
    )


def absent(experiment: Experiment) -> Absent:
    if not experiment.runnable:
        return Absent(why="It is planned, and has its design alone.",
                      command=f"cetane lab show {experiment.id}")  # fmt: skip
    return Absent(why="It has not been run to its end.", command=f"cetane lab run {experiment.id}")


def remarks(experiment: Experiment, outcome: Outcome | None) -> dict[str, str]:
    """What was written, the run's own words before those of the file."""
    found = {
        "Surprise": outcome.surprise if outcome else "",
        "Why it differs from the original": experiment.differs,
        "What only an ANE can judge": experiment.unjudged,
        "Design": experiment.design,
        "Lesson": (outcome.lesson if outcome else "") or experiment.lesson,
        "Next": (outcome.next if outcome else "") or experiment.next,
    }
    return {name: text for name, text in found.items() if text}


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
        both_known = a and b and a.value and b.value is not None
        yield Compared(
            metric=name,
            about=METRICS[name].about if name in METRICS else "",
            unit=known[0].unit,
            baseline=value(a),
            candidate=value(b),
            ratio=b.value / a.value if both_known else None,  # type: ignore[union-attr,operator]
            longest=max(ends, default=0.0),
        )


def value(figure: Measured | None) -> Value | None:
    if figure is None:
        return None
    return Value(**figure.model_dump(exclude={"unit"}))


def texts(outcome: Outcome) -> Iterator[Text]:
    first, second = both(outcome)
    for name in dict.fromkeys((*first.texts, *second.texts)):
        yield Text(
            name=name, baseline=first.texts.get(name, ""), candidate=second.texts.get(name, "")
        )


def curves(outcome: Outcome) -> Iterator[Curve]:
    """Curves by name; those of both arms in one picture."""
    arms = dict(zip(ARMS, both(outcome), strict=True))
    for name in dict.fromkeys(name for arm in arms.values() for name in arm.curves):
        yield Curve(
            name=name,
            lines={word: arm.curves[name] for word, arm in arms.items() if name in arm.curves},
        )


def run_row(run: Run) -> RunRow:
    return RunRow(
        run=run.intent.run,
        at=run.intent.at[:16].replace("T", " "),
        status=run.status,
        seconds=run.outcome.seconds if run.outcome else None,
        error=run.outcome.error if run.outcome else "",
    )


def provenance(experiment: Experiment, last: Run | None) -> Iterator[Fact]:
    """What the figures are of, and what took them."""
    if experiment.workload is not None:
        for name, said in experiment.workload.model_dump(exclude_none=True).items():
            yield Fact(name=name.replace("_", " "), value=str(said))
    yield Fact(name="experiment sha256", value=experiment.sha256)
    if last is not None:
        yield Fact(name="command", value=last.intent.command)
        for arm, digest in last.intent.recipes.items():
            yield Fact(name=f"recipe of the {arm}", value=digest)
        for arm, found in last.outcome.arms.items() if last.outcome else ():
            if found.artefact:
                yield Fact(name=f"bundle of the {arm}", value=found.artefact)
        for name, said in last.intent.machine.items():
            yield Fact(name=name.replace("_", " "), value=str(said))
        for name, said in last.intent.versions.items():
            if said:
                yield Fact(name=f"version of {name}", value=said)
    for index, reference in enumerate(experiment.references, 1):
        link = reference if reference.startswith(("https://", "http://")) else None
        yield Fact(name=f"reference {index}", value=reference, href=link)
