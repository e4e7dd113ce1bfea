"""cetane lab: experiments as data, run, judged and logged."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cetane.cli.app import Command, paragraphs
from cetane.cli.crew import crew
from cetane.cli.lab_folder import USUAL_FOLDER, FolderOption, lab_option, open_lab, other_folder
from cetane.cli.lab_runs import chosen_experiments, held_outcomes, refuse_unused, run_all
from cetane.cli.options import Json, Scheduler, StoreUrl, Workers, parse_named
from cetane.cli.output import print_json, say, say_next, show_warnings, table
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.lab.experiment import Status
    from cetane.lab.journal import Outcome

STATUSES = "Planned, Prototype, Measured, Shipping, Shelved, Rejected"
commands = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    help="Run experiments, judge them, keep a log.",
    epilog="Example: cetane lab run int8-weights",
)
Name = Annotated[str, typer.Argument(metavar="ID", help="An experiment's id.")]


@commands.callback(invoke_without_command=True)
def lab(context: typer.Context) -> None:
    """The help, without a command."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def command(example: str, name: str | None = None) -> Any:
    """A decorator: enter a command of the lab, with an example in its help."""

    def register(function: Any) -> Any:
        epilog = f"Example: cetane lab {example}"
        text = paragraphs(function.__doc__)
        return commands.command(name, cls=Command, help=text, epilog=epilog)(function)

    return register


@command("list --status shelved", "list")
def list_experiments(
    lab: FolderOption = USUAL_FOLDER,
    status: Annotated[str | None, typer.Option(help="Only experiments of this status.")] = None,
    json: Json = False,
) -> None:
    """List all experiments, with their status and their last run."""
    wanted = None if status is None else as_status(status)
    entries, wrong = open_lab(lab).entries()
    show_warnings(f"not listed: {error.message}" for error in wrong)
    chosen = {
        entry.experiment.id: entry for entry in entries if wanted is None or entry.status == wanted
    }
    if json:
        listed = [
            {
                "id": name,
                "title": entry.experiment.title,
                "group": entry.experiment.group,
                "original": entry.experiment.originally,
                "status": entry.status,
                "last_run": entry.state(),
                "current": entry.latest_current,
            }
            for name, entry in chosen.items()
        ]
        print_json({"experiments": listed})
        return
    rows = [[name, entry.status, entry.state_in_words()] for name, entry in chosen.items()]
    table("experiments", ["id", "status", "last run"], rows)
    say_next("lab", "show", "ID", options={"--lab": other_folder(lab)})


def as_status(text: str) -> "Status":
    """A word of the legend, in any case."""
    from cetane.lab.experiment import STATUS_WORDS
    from cetane.validation import guess

    for word in STATUS_WORDS:
        if text.lower() == word.lower():
            return word
    near = guess(text.capitalize(), STATUS_WORDS)
    raise CetaneError(f"no status {text!r}; {near}known: {', '.join(STATUS_WORDS)}")


@command("show int8-weights")
def show(name: Name, lab: FolderOption = USUAL_FOLDER, json: Json = False) -> None:
    """Show an experiment, its last figures and its verdict."""
    from cetane.cli.lab_tables import show_entry
    from cetane.lab.journal import as_dict

    entry = open_lab(lab).entry(name)
    if not json:
        show_entry(entry)
        if not entry.judged_current:
            say("figures of an earlier definition")
            say_next("lab", "run", name, options={"--lab": other_folder(lab)})
        return
    experiment = entry.experiment
    print_json(
        {
            "experiment": experiment.model_dump(mode="json"),
            "sha256": experiment.sha256 if experiment.runnable else None,
            "status": entry.status,
            "last_run": entry.state(),
            "current": entry.judged_current,
            "outcome": None if entry.outcome is None else as_dict(entry.outcome),
            "verdict": None if entry.verdict is None else as_dict(entry.verdict),
        }
    )


@command("new wider-heads")
def new(name: Name, lab: FolderOption = USUAL_FOLDER, json: Json = False) -> None:
    """Start an experiment: a file to fill in."""
    from cetane.files import make_folder_of, write_text
    from cetane.lab.new import template

    path = lab / f"{name}.toml"
    if path.exists():
        raise CetaneError(f"{path} exists already", "choose another id, or edit that file")
    if name in open_lab(lab, new=True).files():  # the new one would hide it and its runs
        raise CetaneError(f"{name} is an experiment of cetane's own", "choose another id")
    content = template(name, str(path))
    make_folder_of(path)
    write_text(path, content)
    if json:
        print_json({"experiment": str(path)})
    else:
        say(f"wrote {path}")
        say_next("lab", "run", name, options={"--lab": other_folder(lab)})


EveryOption = Annotated[
    bool,
    typer.Option("--all", help="All your experiments (cetane's, if you have none) not yet run."),
]
AgainOption = Annotated[
    bool, typer.Option("--again", help="Also those whose last run is still valid.")
]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--where",
        metavar="NAME=PATH",
        help="Where the model that a workload calls NAME lies, as smollm2=model.gguf.",
    ),
]


@command("run int8-weights")
def run(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="ID", help="Ids of experiments.")
    ] = None,
    every: EveryOption = False,
    again: AgainOption = False,
    lab: FolderOption = USUAL_FOLDER,
    models: ModelsOption = None,
    work: Annotated[Path, typer.Option(help="The folder of the built bundles.")] = Path(
        "build/lab"
    ),
    workers: Workers = None,
    scheduler: Scheduler = None,
    store: StoreUrl = None,
    json: Json = False,
) -> None:
    """Run experiments: build, judge and measure both arms, and log it.

    A stopped run continues. Exit code 1 when a gate fails or a run fails.
    """
    from cetane.cli.lab_tables import show_outcome, show_runs
    from cetane.lab.journal import as_dict
    from cetane.lab.run import claiming
    from cetane.lab.workload import Setting
    from cetane.mil.fast import share_threads

    if bool(names) == every:
        raise CetaneError(
            "give ids of experiments, or only --all",
            f"cetane lab list{lab_option(lab)} has the ids",
        )
    known = parse_named("--where", "NAME=PATH", "gemma3=models/gemma3", models)
    opened = open_lab(lab, new=True)
    setting = Setting(work, {name: Path(path) for name, path in known.items()})
    chosen = chosen_experiments(opened, names or ())
    refuse_unused(setting, chosen)
    share_threads()
    held = held_outcomes(opened, chosen, setting) if every and not again else {}
    if held and not json:
        kept = ", ".join(f"{name} ({outcome.status})" for name, outcome in held.items())
        say(f"not run, since the last run still holds: {kept}; --again runs all")
    made: dict[str, Outcome] = {}
    left = [one for one in chosen if one.id not in held]
    with claiming(left, setting), crew(workers, scheduler, store) as helpers:
        for experiment, outcome in run_all(left, setting, opened, helpers):
            made[experiment.id] = outcome
            if not json:
                show_outcome(experiment, outcome)
    outcomes = [(held | made)[one.id] for one in chosen]
    passed = all(outcome.status == "passed" for outcome in outcomes)
    if json:
        print_json({"outcomes": [as_dict(outcome) for outcome in outcomes]})
    elif len(outcomes) > 1:
        show_runs(outcomes)
    elif passed and chosen:
        name = chosen[0].id
        say_next("report", name, "-o", f"{name}.html", options={"--lab": other_folder(lab)})
    raise typer.Exit(0 if passed else 1)


@command("log int8-weights")
def log(
    name: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Only of this experiment.", show_default="all of yours"),
    ] = None,
    lab: FolderOption = USUAL_FOLDER,
    json: Json = False,
) -> None:
    """Show the journal: intents, outcomes, verdicts."""
    from cetane.cli.lab_tables import show_events
    from cetane.lab.journal import as_dict

    opened = open_lab(lab)
    if name is not None:
        opened.find(name)
        events = [event for event in opened.journal.events() if event.experiment == name]
    else:
        events = opened.journal.own()
    if json:
        print_json({"events": [as_dict(event) for event in events]})
    elif events:
        show_events(events)
    else:
        say(f"nothing was run here yet: cetane lab run ID{lab_option(lab)}")


@command("verdict int8-weights shelved --reason '2 % slower' --obituary 'Never paid.'")
def verdict(
    name: Name,
    status: Annotated[str, typer.Argument(metavar="STATUS", help=f"One of {STATUSES}.")],
    reason: Annotated[str, typer.Option(help="The reason, with a number.")],
    obituary: Annotated[
        str, typer.Option(help="Why not to try again; for shelved and rejected.")
    ] = "",
    lab: FolderOption = USUAL_FOLDER,
    json: Json = False,
) -> None:
    """Record a decision about an experiment."""
    from cetane.lab.journal import as_dict
    from cetane.lab.verdict import decide

    opened = open_lab(lab, new=True)
    experiment = opened.find(name)
    runs = opened.journal.runs().get(name, [])
    decided = decide(experiment, runs, as_status(status), reason, obituary, lab_option(lab))
    opened.journal.append(decided)
    if json:
        print_json({"verdict": as_dict(decided)})
    else:
        say(f"{name}: {decided.status}")


@command("report -o experiments.md")
def report(
    lab: FolderOption = USUAL_FOLDER,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The page.", show_default="decision-log.md in the lab's folder"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write the decision log from the experiments and the journal."""
    from cetane.files import make_folder_of, write_text
    from cetane.lab.document import markdown

    opened = open_lab(lab)
    output = lab / "decision-log.md" if output is None else output
    make_folder_of(output)
    write_text(output, markdown(opened.logged(), opened.journal))
    if json:
        print_json({"page": str(output)})
    else:
        say(f"wrote {output}")
