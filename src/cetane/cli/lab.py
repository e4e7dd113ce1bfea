"""cetane lab: experiments as data, run, judged and logged."""

from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from cetane.cli.output import Json, console, errors, print_json, progress, table
from cetane.errors import CetaneError
from cetane.files import replacing
from cetane.lab.document import Entry, cell, markdown
from cetane.lab.experiment import Experiment, Status, find_experiment, load_experiments, shipped
from cetane.lab.journal import Intent, Journal, Outcome, Verdict, as_dict
from cetane.lab.new import template
from cetane.lab.verdict import decide

commands = typer.Typer(
    no_args_is_help=True, help="Experiments as data: run them, judge them, keep a log."
)
FolderOption = Annotated[
    Path,
    typer.Option(
        "--lab", help="Experiments and journal.jsonl; without experiments there, cetane's own."
    ),
]
HERE = Path("experiments")
Name = Annotated[str, typer.Argument(help="An experiment's id.")]


def library(folder: Path) -> Path:
    """Where the experiments of a lab are."""
    return folder if any(folder.glob("*.toml")) else shipped()


def journal_of(folder: Path) -> Journal:
    """A lab's journal; a last line that a power loss cut off is set aside."""
    journal = Journal(folder / "journal.jsonl")
    lost = journal.repair()
    if lost:
        errors.print(
            f"{journal.path}: the last line was cut off; its {lost} bytes are in {journal.broken}",
            markup=False, soft_wrap=True,
        )  # fmt: skip
    return journal


def entries(folder: Path) -> dict[str, Entry]:
    """Every experiment with its runs and its verdict."""
    journal = journal_of(folder)
    runs, verdicts = journal.runs(), journal.verdicts()
    return {
        name: Entry(experiment, runs.get(name, []), verdicts.get(name))
        for name, experiment in load_experiments(library(folder)).items()
    }


@commands.command("list")
def list_experiments(
    lab: FolderOption = HERE,
    status: Annotated[str | None, typer.Option(help="Only those of this status.")] = None,
    json: Json = False,
) -> None:
    """All experiments, their status, and how their last runs ended."""
    chosen = {
        name: entry
        for name, entry in entries(lab).items()
        if status is None or entry.status == as_status(status)
    }
    if json:
        print_json(
            {
                "experiments": [
                    {
                        "id": name,
                        "title": entry.experiment.title,
                        "group": entry.experiment.group,
                        "original": entry.experiment.status,
                        "status": entry.status,
                        "last_run": entry.state(),
                    }
                    for name, entry in chosen.items()
                ]
            }
        )
        return
    rows = [[n, e.experiment.title, e.experiment.status, e.status, e.state()]
            for n, e in chosen.items()]  # fmt: skip
    table("experiments", ["id", "title", "original", "now", "last run"], rows)


def as_status(text: str) -> Status:
    """A word of the legend, in any case."""
    for word in get_args(Status):
        if text.lower() == word.lower():
            found: Status = word
            return found
    raise CetaneError(f"no status {text!r}; known: {', '.join(get_args(Status))}")


@commands.command()
def show(name: Name, lab: FolderOption = HERE, json: Json = False) -> None:
    """An experiment, what it found last, and what was decided."""
    experiment = find_experiment(library(lab), name)
    journal = journal_of(lab)
    runs, verdict = journal.runs().get(name, []), journal.verdicts().get(name)
    entry = Entry(experiment, runs, verdict)
    if json:
        print_json(
            {
                "experiment": experiment.model_dump(mode="json"),
                "sha256": experiment.sha256 if experiment.runnable else None,
                "status": entry.status,
                "last_run": entry.state(),
                "outcome": None if entry.outcome is None else as_dict(entry.outcome),
                "verdict": None if verdict is None else as_dict(verdict),
            }
        )
        return
    console.print("\n".join(entry.lines()), markup=False, highlight=False)


@commands.command()
def new(name: Name, lab: FolderOption = HERE, json: Json = False) -> None:
    """Start an experiment: a file to fill in."""
    path = lab / f"{name}.toml"
    if path.exists():
        raise CetaneError(f"{path} exists already")
    content = template(name, str(path))
    lab.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(content, encoding="utf-8")
    if json:
        print_json({"experiment": str(path)})
    else:
        console.print(f"wrote {path}; next: cetane lab run {name}", markup=False, soft_wrap=True)


@commands.command()
def run(
    names: Annotated[list[str] | None, typer.Argument(help="Ids of experiments.")] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All that can run and have not, as they are now.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Those too whose last run still holds.")
    ] = False,
    lab: FolderOption = HERE,
    model: Annotated[
        list[str] | None, typer.Option(help="NAME=PATH: where a workload's model is.")
    ] = None,
    work: Annotated[Path, typer.Option(help="Where bundles are kept.")] = Path("build/lab"),
    json: Json = False,
) -> None:
    """Run experiments: build both arms, gate and measure them, log it all. A run that was stopped
    goes on. Exit code 1 when a gate is red or a run failed."""
    from cetane.lab.run import run as run_experiment
    from cetane.lab.run import settled
    from cetane.lab.workload import Setting
    from cetane.mil.fast import share_threads

    if bool(names) == every:
        raise CetaneError("name some experiments, or --all", "cetane lab list has their ids")
    known = load_experiments(library(lab))
    chosen = [find_experiment(library(lab), name) for name in names or ()]
    chosen = chosen or [experiment for experiment in known.values() if experiment.runnable]
    share_threads()
    journal, setting = journal_of(lab), Setting(work, models(model or []))
    runs, outcomes = journal.runs(), []
    for experiment in chosen:
        held = settled(experiment, runs.get(experiment.id, []))
        if held is not None and held.outcome is not None and every and not again:
            outcomes.append(held.outcome)
            continue
        with progress(experiment.id) as update:
            outcomes.append(run_experiment(experiment, setting, journal, update))
        if not json:
            tell(experiment, outcomes[-1])
    if json:
        print_json({"outcomes": [as_dict(outcome) for outcome in outcomes]})
    elif len(outcomes) > 1:
        rows = [[o.experiment, o.status, f"{o.seconds:.0f}", o.error or o.surprise]
                for o in outcomes]  # fmt: skip
        table("runs", ["id", "ended", "s", "error or surprise"], rows)
    raise typer.Exit(0 if all(o.status == "passed" for o in outcomes) else 1)


def models(given: list[str]) -> dict[str, Path]:
    """`NAME=PATH` options."""
    found = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise CetaneError(f"--model {text!r}: not NAME=PATH")
        found[name] = Path(path)
    return found


def tell(experiment: Experiment, outcome: Outcome) -> None:
    """What a run found."""
    if outcome.error:
        errors.print(f"{experiment.id}: error: {outcome.error}", markup=False, soft_wrap=True)
        return
    arms = outcome.arms
    rows: list[list[Any]] = []
    for metric in experiment.metrics:
        ours, theirs = arms["candidate"].metrics.get(metric), arms["baseline"].metrics.get(metric)
        kind = (ours or theirs).kind if ours or theirs else ""  # type: ignore[union-attr]
        rows.append([metric, cell(theirs), cell(ours), kind])
    table(experiment.title, ["metric", "baseline", "candidate", ""], rows)
    gates = [[g.metric, g.arm, g.value, "pass" if g.passed else "FAIL"] for g in outcome.gates]
    if gates:
        table("gates", ["metric", "of", "value", "verdict"], gates)
    for title, text in (("surprise", outcome.surprise), ("lesson", outcome.lesson)):
        if text:
            console.print(f"{title}: {text}", markup=False, soft_wrap=True)


@commands.command()
def log(
    name: Annotated[str | None, typer.Argument(help="Only of this experiment.")] = None,
    lab: FolderOption = HERE,
    json: Json = False,
) -> None:
    """The journal: intents, outcomes, verdicts."""
    if name is not None:
        find_experiment(library(lab), name)
    events = [e for e in journal_of(lab).events() if name is None or e.experiment == name]
    if json:
        print_json({"events": [as_dict(event) for event in events]})
        return
    ended = {event.run for event in events if isinstance(event, Outcome)}
    rows = []
    for event in events:
        match event:
            case Intent():
                what = "runs" if event.run in ended else "runs, or was interrupted"
            case Outcome():
                what = f"{event.status} in {event.seconds:.0f} s" + (
                    f": {event.error or event.surprise}" if event.error or event.surprise else ""
                )
            case Verdict():
                what = f"{event.status}: {event.reason}"
        rows.append([event.at[:19], event.event, event.experiment, what])
    table("journal", ["at (UTC)", "event", "experiment", "what"], rows)


@commands.command()
def verdict(
    name: Name,
    status: Annotated[str, typer.Argument(help=f"One of {', '.join(get_args(Status))}.")],
    reason: Annotated[str, typer.Option(help="Why, with a number.")],
    obituary: Annotated[str, typer.Option(help="For what is shelved or rejected.")] = "",
    lab: FolderOption = HERE,
    json: Json = False,
) -> None:
    """Decide what becomes of an experiment."""
    experiment, journal = find_experiment(library(lab), name), journal_of(lab)
    runs = journal.runs().get(name, [])
    decided = decide(experiment, runs, as_status(status), reason, obituary)
    journal.append(decided)
    if json:
        print_json({"verdict": as_dict(decided)})
    else:
        console.print(f"{name}: {decided.status}", markup=False)


@commands.command()
def report(
    lab: FolderOption = HERE,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path(
        "docs/experiments.md"
    ),
    json: Json = False,
) -> None:
    """Write the decision log from the experiments and the journal."""
    page = markdown(load_experiments(library(lab)), journal_of(lab))
    output.parent.mkdir(parents=True, exist_ok=True)
    with replacing(output) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if json:
        print_json({"page": str(output)})
    else:
        console.print(f"wrote {output}", markup=False, soft_wrap=True)
