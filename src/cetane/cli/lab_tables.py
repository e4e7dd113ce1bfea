"""Tables of experiments and their runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from cetane.cli.output import console, facts, table, verdict, warn
from cetane.lab.document import cell, change_texts, extras
from cetane.lab.entry import Entry
from cetane.lab.experiment import ARMS, ArmName, Experiment
from cetane.lab.journal import Intent, Outcome, Verdict


def show_entry(entry: Entry) -> None:
    """Print an experiment: its idea, its figures and its verdict."""
    one = entry.experiment
    facts(
        {
            "status": f"{entry.status}; original {one.date}: {one.originally}",
            "idea": one.hypothesis,
            "expects": "; ".join(map(str, one.expects)),
            "design": one.design,
        }
        | ({name: recipe_of(one, name) for name in ARMS} if one.runnable else {})
        | {"last run": entry.state_in_words()},
        title=f"{one.title} ({one.id})",
    )
    if entry.outcome is not None:
        show_outcome(one, entry.outcome)
    if one.reported:
        columns = ["original figure", "baseline", "candidate", "source"]
        rows = [[r.what, r.baseline, r.candidate, r.source] for r in one.reported]
        table("reported", columns, rows)
    decided = entry.verdict
    when = ", decided before the last run" if entry.decided_earlier else ""
    facts(
        {
            "why ours differs": one.differs,
            "not judged here": one.unjudged,
            "next": one.next,
            "verdict": f"{decided.status}{when}: {decided.reason}" if decided else "",
            "obituary": (decided and decided.obituary) or one.obituary,
            "references": "; ".join(one.references),
        },
        title="what follows",
    )


def recipe_of(experiment: Experiment, name: ArmName) -> str:
    """An arm's recipe, and all that differs from it."""
    arm = experiment.arm(name)
    changes = list(change_texts(arm.changes))
    told = [arm.recipe + (f" with {', '.join(changes)}" if changes else "")]
    if scaled := list(change_texts(arm.scaled)):
        told.append(f"scaled to {', '.join(scaled)}")
    return "; ".join([*told, *extras(arm)])


def show_outcome(experiment: Experiment, outcome: Outcome) -> None:
    """Print the figures of a run, its gates and its lesson."""
    if outcome.error:
        warn(f"{experiment.id}: error: {outcome.error}")
        return
    baseline, candidate = (outcome.arms[name].metrics for name in ("baseline", "candidate"))
    rows = [
        [metric, cell(baseline.get(metric)), cell(candidate.get(metric)), figure.kind]
        for metric in experiment.metrics
        if (figure := candidate.get(metric) or baseline.get(metric))
    ]
    table(experiment.title, ["metric", "baseline", "candidate", ""], rows)
    for gate in outcome.gates:
        value = "nothing" if gate.value is None else f"{gate.value:.4g}"
        told = escape(f"gate {gate.limit}: {value}")
        console.print(f"{told}: {verdict(gate.passed)}", soft_wrap=True)
    facts({"surprise": outcome.surprise, "lesson": outcome.lesson})


def show_runs(outcomes: Sequence[Outcome]) -> None:
    """Print the ends of several runs."""
    rows = [[o.experiment, o.status, f"{o.seconds:.0f}", o.error or o.surprise] for o in outcomes]
    table("runs", ["id", "ended", "s", "error or surprise"], rows)


def show_events(events: Sequence[Intent | Outcome | Verdict]) -> None:
    """Print lines of a journal."""
    ended = {event.run for event in events if isinstance(event, Outcome)}
    rows = []
    for event in events:
        match event:
            case Intent():
                what = "runs" if event.run in ended else "runs, or was interrupted"
            case Outcome():
                reason = event.error or event.surprise
                what = f"{event.status} in {event.seconds:.0f} s" + (
                    f": {reason}" if reason else ""
                )
            case Verdict():
                what = f"{event.status}: {event.reason}"
        rows.append([event.at[:19].replace("T", " "), event.event, event.experiment, what])
    table("journal", ["at", "event", "experiment", ""], rows)
