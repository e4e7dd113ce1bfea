"""docs/experiments.md: the decision log, written from the experiments and the journal alone."""

from collections.abc import Iterable, Iterator, Sequence

from cetane.lab.experiment import ARMS, Arm, Experiment, Report
from cetane.lab.journal import ArmOutcome, Figure, Journal, Outcome, Run, Verdict

ANSWERS = 3
"""Of an arm, that are shown; the journal has all."""
INTRODUCTION = """\
# Experiments

What was tried, what it came to, and what was decided: every row of the two published ports' logs
(CoreML-LLM's `EXPERIMENTS.md`, ane-book's experiments 29 to 36) as an experiment that runs here. An
experiment is one file of `experiments/`; `experiments/journal.jsonl` holds the intent and the
outcome of every run. This page is written from both: `cetane lab report`.

*Measured* figures were taken here, on the portable backend under Linux: sizes, accuracy and
acceptance hold anywhere, milliseconds compare the two sides on this machine, in turns, and say
nothing of an ANE. *Predicted* figures stand where only an ANE could tell: residency by rules
(`docs/residency.md`), milliseconds of the real model's shapes by a cost model fitted to published
measurements (`docs/performance.md`). An interval is that of the quartiles of what was measured, or
of a prediction.

| status | means |
| --- | --- |
| Shipping | in a recipe that comes with cetane, and recommended |
| Measured | run and judged; its figure is the result |
| Prototype | runs end to end and is right; not the default |
| Shelved | built far enough to judge, and put away |
| Rejected | judged, and not to be built again |
| Planned | designed, not built |

The status of a heading is the last verdict in the journal; where there is none, the original's.
"""


def markdown(experiments: dict[str, Experiment], journal: Journal) -> str:
    """The page; the same for the same files."""
    runs, verdicts = journal.runs(), journal.verdicts()
    entries = [
        Entry(experiment, runs.get(name, []), verdicts.get(name))
        for name, experiment in experiments.items()
    ]
    lines = [INTRODUCTION, "## All", "", *overview(entries)]
    for group in dict.fromkeys(entry.experiment.group for entry in entries):
        lines += ["", f"## {group}"]
        for entry in entries:
            if entry.experiment.group == group:
                lines += ["", *entry.lines()]
    return "\n".join(lines) + "\n"


class Entry:
    """One experiment's part of the page."""

    def __init__(self, experiment: Experiment, runs: list[Run], verdict: Verdict | None) -> None:
        self.experiment, self.verdict = experiment, verdict
        ended = [run for run in runs if run.status in ("passed", "failed")]
        self.last = ended[-1] if ended else None
        self.latest = runs[-1] if runs else None

    @property
    def status(self) -> str:
        return self.verdict.status if self.verdict else self.experiment.status

    @property
    def outcome(self) -> Outcome | None:
        return self.last.outcome if self.last else None

    def state(self) -> str:
        """How its last run ended."""
        if not self.experiment.runnable:
            return "not built"
        return "not run" if self.latest is None else self.latest.status

    def lines(self) -> Iterator[str]:
        one = self.experiment
        yield f"### {one.title} — {self.status}"
        yield ""
        yield f"`{one.id}`; original {one.date}: {one.status}. {one.hypothesis}"
        if one.design:
            yield from paragraph("Design", one.design)
        if one.runnable:
            yield ""
            yield from (f"- {name}: {describe(one.arm(name))}" for name in ARMS)
            yield f"- on {self.setting()}"
        if self.outcome:
            yield ""
            yield from figures(self.outcome)
            yield from self.findings(self.outcome)
        if one.reported:
            yield ""
            yield from reported(one.reported)
        yield from paragraph("Why ours differs", one.differs)
        yield from paragraph("Not judged here", one.unjudged)
        yield from paragraph("Lesson", one.lesson)
        yield from paragraph("Next", one.next)
        if self.verdict:
            yield from paragraph(
                f"Verdict ({self.verdict.at[:10]})", f"{self.verdict.status}: {self.verdict.reason}"
            )
        yield from paragraph("Obituary", (self.verdict and self.verdict.obituary) or one.obituary)
        if one.references:
            yield from paragraph("References", "; ".join(one.references))
        if self.last:
            yield from paragraph("Run", provenance(self.last))
        elif self.latest and self.latest.outcome and self.latest.outcome.error:
            yield from paragraph("Last run", f"error: {self.latest.outcome.error}")

    def setting(self) -> str:
        work = self.experiment.workload
        assert work is not None
        there = (
            f", speed predicted for {work.stands_for}" if work.stands_for else ", speed predicted"
        )
        speed = f"{there} on {work.chip}" if "predicted_ms" in self.experiment.metrics else ""
        return f"`{work.model}`, {work.tokens} tokens of {work.text}, prompts {work.prompts}{speed}"

    def findings(self, outcome: Outcome) -> Iterator[str]:
        for gate in outcome.gates:
            bounds = " and ".join(
                f"{word} {bound:g}"
                for word, bound in (("at least", gate.least), ("at most", gate.most))
                if bound is not None
            )
            whose = {"ratio": " to the baseline's", "baseline": " of the baseline"}.get(
                gate.arm, ""
            )
            found = "nothing" if gate.value is None else f"{gate.value:.4g}"
            verdict = "pass" if gate.passed else "**fail**"
            yield ""
            yield f"Gate: {gate.metric}{whose} {bounds}: {found}, {verdict}."
        yield from paragraph("Surprise", outcome.surprise)
        for name in ARMS:
            for title, text in texts(outcome.arms[name]) if name in outcome.arms else ():
                shown = text.replace("\n", "⏎").replace("`", "'").replace("|", "¦")
                yield ""
                yield f"{title}, {name}: `{shown[:300]}`"
            for title, points in (
                outcome.arms[name].curves if name in outcome.arms else {}
            ).items():
                yield ""
                yield f"{title}, {name}: " + ", ".join(f"{x:g}: {y:g}" for x, y in points)


def texts(arm: ArmOutcome) -> Iterator[tuple[str, str]]:
    """What there is to read; of many answers the first."""
    answers = [title for title in arm.texts if title.startswith("smoke ")]
    yield from ((t, text) for t, text in arm.texts.items() if t not in answers[ANSWERS:])


def overview(entries: Sequence[Entry]) -> Iterator[str]:
    """One row an experiment."""
    yield "| experiment | original | now | last run | gates |"
    yield "| --- | --- | --- | --- | --- |"
    for entry in entries:
        outcome = entry.outcome
        gates = "" if outcome is None else "; ".join(
            f"{g.metric} {'-' if g.value is None else f'{g.value:.4g}'}" for g in outcome.gates
        )  # fmt: skip
        one = entry.experiment
        cells = [f"{one.title} (`{one.id}`)", one.status, entry.status, entry.state(), gates]
        yield f"| {' | '.join(cells)} |"


def describe(arm: Arm) -> str:
    """A recipe and how it was changed."""
    parts = [f"`{arm.recipe}`"]
    for word, changes in (("with", arm.changes), ("scaled to", arm.scaled)):
        if changes:
            parts.append(f"{word} {', '.join(changed(changes))}")
    if arm.drafter:
        parts.append(f"drafts by {arm.drafter}")
    if arm.activations:
        parts.append(f"8-bit activations, calibration {arm.activations}")
    return "; ".join(parts)


def changed(tables: dict[str, object]) -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from (f"`{key}.{name} = {shown(field)}`" for name, field in value.items())
        else:
            yield f"`{key} = {shown(value)}`"


def shown(value: object) -> str:
    """A value nearly as TOML has it."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace("'", '"')


def figures(outcome: Outcome) -> Iterator[str]:
    """Both sides, metric by metric."""
    yield "| metric | baseline | candidate | ratio | |"
    yield "| --- | --- | --- | --- | --- |"
    both = [outcome.arms[name].metrics for name in ARMS]
    for metric in dict.fromkeys(name for arm in both for name in arm):
        ours, theirs = both[1].get(metric), both[0].get(metric)
        values = [f.value if f else None for f in (theirs, ours)]
        ratio = ""
        if values[0] and values[1] is not None:
            ratio = f"{values[1] / values[0]:.4g}"
        any_figure = ours or theirs
        assert any_figure is not None
        notes = [any_figure.kind, any_figure.note] if any_figure.note else [any_figure.kind]
        yield f"| {metric} | {cell(theirs)} | {cell(ours)} | {ratio} | {', '.join(notes)} |"


def cell(figure: Figure | None) -> str:
    """A figure with its unit and its spread."""
    if figure is None:
        return ""
    if figure.value is None:
        return "none"
    text, unit = number(figure.value, figure.unit)
    if figure.low is None or figure.high is None:
        return f"{text} {unit}".strip()
    low, high = number(figure.low, figure.unit)[0], number(figure.high, figure.unit)[0]
    return f"{text} ({low} to {high}) {unit}".strip()


def number(value: float, unit: str) -> tuple[str, str]:
    """For people: bytes in megabytes, shares without a unit."""
    if unit == "B":
        return f"{value / 1e6:.4g}", "MB"
    return f"{value:.5g}", "" if unit in ("share",) else unit


def reported(reports: Iterable[Report]) -> Iterator[str]:
    yield "| the original says | baseline | candidate | source |"
    yield "| --- | --- | --- | --- |"
    for report in reports:
        yield f"| {report.what} | {report.baseline} | {report.candidate} | {report.source} |"


def paragraph(title: str, text: str | None) -> Iterator[str]:
    """A paragraph that starts with its title; nothing for no text."""
    if text:
        yield ""
        yield f"**{title}.** {' '.join(text.split())}"


def provenance(run: Run) -> str:
    """When and where, and of what."""
    intent = run.intent
    assert run.outcome is not None
    digests = ", ".join(
        f"{name} {arm.artefact[:12]}" for name, arm in run.outcome.arms.items() if arm.artefact
    )
    return (
        f"{intent.at[:10]}, {run.outcome.seconds:.0f} s, {intent.machine['processor']}, "
        f"{intent.machine['cores']} cores; cetane {intent.versions.get('cetane')}, coremltools "
        f"{intent.versions.get('coremltools')}, torch {intent.versions.get('torch')}; run "
        f"{intent.run}" + (f"; bundles {digests}" if digests else "")
    )
