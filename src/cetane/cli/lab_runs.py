"""Runs of experiments, as `cetane lab run` asks for them."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cetane.cli.output import progress
from cetane.errors import CetaneError

if TYPE_CHECKING:
    from cetane.lab.experiment import Experiment
    from cetane.lab.journal import Outcome
    from cetane.lab.library import Lab
    from cetane.lab.workload import Setting
    from cetane.tasks.workers import Workers


def refuse_unused(setting: "Setting", experiments: "list[Experiment]") -> None:
    """Raise CetaneError for a model by path that no workload of the experiments names."""
    used = {one.workload.model for one in experiments if one.workload is not None}
    for name in setting.models:
        if name not in used:
            raise CetaneError(
                f"--where {name}: no workload of these experiments has that model",
                f"they have {', '.join(sorted(used)) or 'none'}",
            )


def run_all(
    experiments: "list[Experiment]", setting: "Setting", lab: "Lab", workers: "Workers | None"
) -> "Iterator[tuple[Experiment, Outcome]]":
    """Run experiments, one after the other or by workers. Gives each as it ends."""
    from cetane.lab.run import run as run_experiment
    from cetane.lab.run import run_together

    if workers is None:
        for experiment in experiments:
            with progress(experiment.id) as update:
                outcome = run_experiment(experiment, setting, lab.journal, update)
            yield experiment, outcome
        return
    known = {one.id: one for one in experiments}
    with progress("lab") as update:
        for outcome in run_together(experiments, setting, lab.journal, workers, update):
            yield known[outcome.experiment], outcome


def chosen_experiments(lab: "Lab", names: Sequence[str]) -> "list[Experiment]":
    """The experiments of these ids; without ids, all of the lab's own that can run."""
    chosen = [lab.find(name) for name in names]
    return chosen or [one for one in lab.own().values() if one.runnable]


def held_outcomes(
    lab: "Lab", experiments: "list[Experiment]", setting: "Setting"
) -> "dict[str, Outcome]":
    """The outcomes of last runs, by the experiment's id, where another run would give the same."""
    from cetane.lab.run import settled

    runs = lab.journal.runs()
    last = {one.id: settled(one, setting, runs.get(one.id, [])) for one in experiments}
    return {name: run.outcome for name, run in last.items() if run is not None and run.outcome}
