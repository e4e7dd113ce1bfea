"""The run of an experiment: intent, build, gates and measures of both sides, and the outcome."""

import datetime
import gc
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from cetane.errors import CetaneError, printable
from cetane.files import Progress, claimed
from cetane.lab.experiment import ARMS, ArmName, Experiment, Limit, recipe_sha256
from cetane.lab.journal import (
    ArmOutcome,
    Ended,
    GateOutcome,
    Intent,
    Journal,
    Outcome,
    Run,
    now,
    value_of,
)
from cetane.lab.machine import machine, versions
from cetane.lab.metrics import METRICS
from cetane.lab.sides import MEASURES, Findings, Measure, Sides
from cetane.lab.workload import Setting
from cetane.tasks.workers import Workers

ArmOutcomes = Mapping[ArmName, ArmOutcome]
"""What one measure says of both arms."""
ANOTHER_WORK = "wait until it has ended, or choose another folder with --work"
"""The advice to a second run of an experiment."""


def run(experiment: Experiment, setting: Setting, journal: Journal, progress: Progress) -> Outcome:
    """Run one experiment and log it.

    An exception becomes an outcome. So does Ctrl-C, which is then raised again. A kill leaves an
    intent without an outcome.
    """
    check_runnable(experiment)
    intent = declare(experiment, setting)
    journal.append(intent)

    def gather() -> Iterator[ArmOutcomes]:
        return observe(experiment, setting, progress)

    return conclude(experiment, intent, journal, gather)


def run_together(
    experiments: Sequence[Experiment],
    setting: Setting,
    journal: Journal,
    workers: Workers,
    progress: Progress,
) -> Iterator[Outcome]:
    """Run experiments: workers build their arms and take their measures. Logs each as `run` does.

    Measures of time come last, and have the machine to themselves.
    """
    from cetane.lab.tasks import LabTasks  # torch imports slowly

    for experiment in experiments:
        check_runnable(experiment)
    intents = {one.id: declare(one, setting) for one in experiments}
    for intent in intents.values():
        journal.append(intent)
    try:
        for experiment, gather in LabTasks(experiments, setting, workers, progress).run():
            yield conclude(experiment, intents.pop(experiment.id), journal, gather)
    finally:  # after a Ctrl-C too
        for intent in intents.values():
            journal.append(ended(intent, "interrupted"))


@contextmanager
def claiming(experiments: Iterable[Experiment], setting: Setting) -> Iterator[None]:
    """A context in which no other process runs these experiments in the work folder.

    A second run would clash with the first one over a bundle, and be the last of the journal.
    Raises CetaneError if another process runs one, before anything is logged.
    """
    with ExitStack() as claims:
        for name in sorted({one.id for one in experiments}):
            claims.enter_context(claimed(setting.folder / name, f"running {name}", ANOTHER_WORK))
        yield


def check_runnable(experiment: Experiment) -> None:
    """Raise CetaneError for an experiment that is only a plan."""
    if not experiment.runnable:
        raise CetaneError(
            f"{experiment.id} is Planned: there is nothing to run", "cetane lab show has its design"
        )


def conclude(
    experiment: Experiment,
    intent: Intent,
    journal: Journal,
    gather: Callable[[], Iterator[ArmOutcomes]],
) -> Outcome:
    """Judge what was gathered, and log the outcome."""
    arms: dict[ArmName, ArmOutcome] = {}
    gates: tuple[GateOutcome, ...] = ()
    status: Ended = "interrupted"
    error = ""
    try:
        arms = joined(experiment, list(gather()))
        gates = tuple(judge(limit, arms) for limit in experiment.gates)
        status = "passed" if all(gate.passed for gate in gates) else "failed"
    except Exception as failure:
        status = "error"
        known = isinstance(failure, CetaneError)
        error = printable(str(failure) if known else f"{type(failure).__name__}: {failure}")
    finally:  # after a Ctrl-C too, which is then raised again
        outcome = ended(
            intent, status, arms=arms, gates=gates, error=error,
            surprise="; ".join(surprises(experiment, arms)) if arms else "",
            lesson=experiment.lesson, next=experiment.next,
        )  # fmt: skip
        journal.append(outcome)
        gc.collect()  # frees two bundles and a reference before the next experiment
    return outcome


def ended(intent: Intent, status: Ended, **found: Any) -> Outcome:
    """The outcome of a run that ends now, with what it found."""
    at = now()
    started, stopped = map(datetime.datetime.fromisoformat, (intent.at, at))
    return Outcome(
        run=intent.run,
        experiment=intent.experiment,
        at=at,
        status=status,
        seconds=(stopped - started).total_seconds(),
        **found,
    )


def declare(experiment: Experiment, setting: Setting) -> Intent:
    """The intent of a run, with its recipes, inputs, machine and versions."""
    return Intent(
        run=secrets.token_hex(8),
        experiment=experiment.id,
        at=now(),
        experiment_sha256=experiment.sha256,
        command=f"cetane lab run {experiment.id}",
        recipes=experiment.recipes_sha256,
        machine=machine(),
        versions=versions(),
        inputs=setting.inputs(experiment),
    )


def measure_names(experiment: Experiment) -> list[str]:
    """The names of an experiment's measures. Raises CetaneError if one is not known."""
    names = list(dict.fromkeys(METRICS[metric].measure for metric in experiment.metrics))
    for name in names:
        if name not in registered():
            raise CetaneError(f"no function measures {name!r}")
    return names


def registered() -> Mapping[str, Measure]:
    """All measures. Workers call this too, so it imports the modules that register them."""
    import cetane.lab.measures  # noqa: F401  here, since torch imports slowly

    return MEASURES


def observe(experiment: Experiment, setting: Setting, progress: Progress) -> Iterator[ArmOutcomes]:
    """Build both sides and take each measure once."""
    names = measure_names(experiment)
    sides = Sides(experiment, setting, progress)
    for done, name in enumerate(names):
        progress(name, done, len(names))
        yield take(sides, name)
    progress("done", len(names), len(names))


def take(sides: Sides, name: str) -> ArmOutcomes:
    """Take one measure."""
    findings = {arm: Findings() for arm in ARMS} | dict(registered()[name](sides))
    return {
        arm: ArmOutcome(
            artefact=None if side.made is None else side.made.digest,
            recipe=recipe_sha256(side.recipe),
            metrics=findings[arm].figures,
            texts=findings[arm].texts,
            curves={name: tuple(points) for name, points in findings[arm].curves.items()},
        )
        for arm, side in sides.by_arm.items()
    }


def joined(experiment: Experiment, parts: Sequence[ArmOutcomes]) -> dict[ArmName, ArmOutcome]:
    """The outcomes of both arms. Keeps only the experiment's metrics, and needs a value of each."""
    outcomes: dict[ArmName, ArmOutcome] = {}
    for arm in ARMS:
        known = [part[arm] for part in parts]
        figures = {name: figure for one in known for name, figure in one.metrics.items()}
        outcomes[arm] = ArmOutcome(
            artefact=next((one.artefact for one in known if one.artefact), None),
            recipe=known[0].recipe,
            metrics={name: figures[name] for name in experiment.metrics if name in figures},
            texts={name: text for one in known for name, text in one.texts.items()},
            curves={name: points for one in known for name, points in one.curves.items()},
        )
    missing = [
        metric
        for metric in experiment.metrics
        if not any(metric in outcome.metrics for outcome in outcomes.values())
    ]
    if missing:
        raise CetaneError(f"no measure gave a value for {', '.join(missing)}")
    return outcomes


def judge(limit: Limit, arms: Mapping[ArmName, ArmOutcome]) -> GateOutcome:
    """The outcome of a gate. Without a value it fails."""
    value = value_of(limit.metric, limit.of, arms)
    return GateOutcome(
        metric=limit.metric,
        arm=limit.of,
        least=limit.least,
        most=limit.most,
        value=value,
        passed=value is not None and limit.holds(value),
    )


def surprises(experiment: Experiment, arms: Mapping[ArmName, ArmOutcome]) -> list[str]:
    """The parts of the hypothesis that do not hold."""
    result = []
    for limit in experiment.expects:
        value = value_of(limit.metric, limit.of, arms)
        if value is None:
            result.append(f"expected {limit}, found nothing")
        elif not limit.holds(value):
            result.append(f"expected {limit}, found {value:.4g}")
    return result


def settled(experiment: Experiment, setting: Setting, runs: list[Run]) -> Run | None:
    """The last run, if another would give the same result; else None.

    It must have ended, with the same experiment, recipes, model, text and version of cetane. An
    input counts only if its hash is known of both.
    """
    last = runs[-1] if runs else None
    if last is None or last.status not in ("passed", "failed"):
        return None
    same = last.intent.versions.get("cetane") == versions()["cetane"]
    if not same or not last.fits(experiment):
        return None
    return last if last.intent.saw(setting.inputs(experiment)) else None
