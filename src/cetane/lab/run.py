"""The run of an experiment: intent, build, gates and measures of both sides, and the outcome."""

import gc
import secrets
import time
from collections.abc import Mapping

from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.lab.experiment import ARMS, ArmName, Experiment, Limit
from cetane.lab.journal import (
    ArmOutcome,
    Ended,
    Figure,
    GateOutcome,
    Intent,
    Journal,
    Outcome,
    Run,
    machine,
    now,
    versions,
)
from cetane.lab.metrics import METRICS
from cetane.lab.sides import MEASURES, Findings, Sides, recipe_sha256
from cetane.lab.workload import Setting


def run(experiment: Experiment, setting: Setting, journal: Journal, progress: Progress) -> Outcome:
    """Run one experiment and log it.

    An exception becomes an outcome. So does Ctrl-C, which is then raised again. A kill leaves an
    intent without an outcome.
    """
    if not experiment.runnable:
        raise CetaneError(
            f"{experiment.id} is Planned: there is nothing to run", "cetane lab show has its design"
        )
    intent = declare(experiment)
    journal.append(intent)
    started = time.perf_counter()
    arms: dict[ArmName, ArmOutcome] = {}
    gates: tuple[GateOutcome, ...] = ()
    status: Ended = "interrupted"
    error = ""
    try:
        arms = observe(experiment, setting, progress)
        gates = tuple(judge(limit, arms) for limit in experiment.gates)
        status = "passed" if all(gate.passed for gate in gates) else "failed"
    except Exception as failure:
        status = "error"
        known = isinstance(failure, CetaneError)
        error = str(failure) if known else f"{type(failure).__name__}: {failure}"
    finally:  # after a Ctrl-C too, which is then raised again
        outcome = Outcome(
            run=intent.run,
            experiment=experiment.id,
            at=now(),
            status=status,
            seconds=time.perf_counter() - started,
            arms=arms,
            gates=gates,
            surprise="; ".join(surprises(experiment, arms)) if arms else "",
            lesson=experiment.lesson,
            next=experiment.next,
            error=error,
        )
        journal.append(outcome)
        gc.collect()  # frees two bundles and a reference before the next experiment
    return outcome


def declare(experiment: Experiment) -> Intent:
    """The intent of a run, with its recipes, machine and versions."""
    return Intent(
        run=secrets.token_hex(8),
        experiment=experiment.id,
        at=now(),
        experiment_sha256=experiment.sha256,
        command=f"cetane lab run {experiment.id}",
        recipes=recipes(experiment),
        machine=machine(),
        versions=versions(),
    )


def recipes(experiment: Experiment) -> dict[ArmName, str]:
    """The hashes of both arms' recipes; empty if a recipe is unknown, which the run reports."""
    try:
        return {name: recipe_sha256(experiment.arm(name).recipe_here()) for name in ARMS}
    except CetaneError:
        return {}


def observe(
    experiment: Experiment, setting: Setting, progress: Progress
) -> dict[ArmName, ArmOutcome]:
    """Build both sides and take each measure once. Keeps only the experiment's metrics."""
    import cetane.lab.measures  # noqa: F401  registers them; here, since torch imports slowly

    names = dict.fromkeys(METRICS[metric].measure for metric in experiment.metrics)
    bench = Sides(experiment, setting, progress)
    gathered: dict[ArmName, Findings] = {name: Findings() for name in ARMS}
    for done, name in enumerate(names):
        progress(name, done, len(names))
        if name not in MEASURES:
            raise CetaneError(f"no function measures {name!r}")
        for arm, findings in MEASURES[name](bench).items():
            gathered[arm].update(findings)
    progress("done", len(names), len(names))
    outcomes: dict[ArmName, ArmOutcome] = {}
    for arm, side in bench.sides.items():
        figures = gathered[arm].figures
        outcomes[arm] = ArmOutcome(
            artefact=None if side.made is None else side.made.digest,
            recipe=recipe_sha256(side.recipe),
            metrics={name: figures[name] for name in experiment.metrics if name in figures},
            texts=gathered[arm].texts,
            curves={name: tuple(points) for name, points in gathered[arm].curves.items()},
        )
    missing = [
        metric
        for metric in experiment.metrics
        if not any(metric in outcome.metrics for outcome in outcomes.values())
    ]
    if missing:
        raise CetaneError(f"no measure gave a value for {', '.join(missing)}")
    return outcomes


def value_of(limit: Limit, arms: Mapping[ArmName, ArmOutcome]) -> float | None:
    """The value that a limit bounds; None if it is missing."""
    values = {}
    for name in ARMS:
        figure: Figure | None = arms[name].metrics.get(limit.metric)
        values[name] = None if figure is None else figure.value
    if limit.of != "ratio":
        return values[limit.of]
    ours, theirs = values["candidate"], values["baseline"]
    return None if ours is None or not theirs else ours / theirs


def judge(limit: Limit, arms: Mapping[ArmName, ArmOutcome]) -> GateOutcome:
    """The outcome of a gate. Without a value it fails."""
    value = value_of(limit, arms)
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
        value = value_of(limit, arms)
        if value is None:
            result.append(f"expected {limit}, found nothing")
        elif not limit.holds(value):
            result.append(f"expected {limit}, found {value:.4g}")
    return result


def settled(experiment: Experiment, runs: list[Run]) -> Run | None:
    """The last run, if another would give the same result; else None.

    It must have ended, with the same experiment, the same recipes and the same cetane.
    """
    last = runs[-1] if runs else None
    if last is None or last.status not in ("passed", "failed"):
        return None
    same = (
        last.intent.experiment_sha256 == experiment.sha256
        and last.intent.recipes == recipes(experiment)
        and last.intent.versions.get("cetane") == versions()["cetane"]
    )
    return last if same else None
