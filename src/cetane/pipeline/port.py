"""The whole way from a checkpoint to a bundle that is proved right."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.files import Progress, silent
from cetane.gates.golden import GoldenResult
from cetane.gates.golden import golden as compare_with_model
from cetane.gates.ladder import LadderResult, ladder
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.store import summary
from cetane.gates.residency.target import Target
from cetane.mil.reader import load
from cetane.pipeline.build import build
from cetane.pipeline.calibration import resolve_recipe
from cetane.pipeline.plan import Forecast, forecast, prediction_json
from cetane.pipeline.request import Request, make_request
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Recipe


class Gate(Protocol):
    """What every gate's outcome tells."""

    @property
    def passed(self) -> bool: ...


@dataclass(frozen=True)
class PortResult:
    """How a port went. A gate that fails is part of the result, not an exception."""

    plan: Plan
    bundle: Bundle | None
    """None when the first shards failed their gate: the others were not built."""
    ladder: LadderResult | None
    """The first shard of every kind against the model; None for a bundle that was there before."""
    residency: Audit | None
    """Where the ops of those shards are predicted to run; None as above."""
    golden: GoldenResult | None
    """The finished bundle against the model; None when there is no bundle."""
    forecast: Forecast
    """How fast the default chip is predicted to run the plan."""
    seconds: Mapping[str, float]
    """Wall-clock seconds by stage: `build` (without the gates), `ladder`, `residency`, `golden`."""

    @property
    def gates(self) -> dict[str, Gate]:
        """The outcomes of the gates that ran, by name."""
        named = {"ladder": self.ladder, "residency": self.residency, "golden": self.golden}
        return {name: outcome for name, outcome in named.items() if outcome is not None}

    @property
    def passed(self) -> bool:
        """Whether the bundle is right. Residency is a prediction: it warns, and decides nothing."""
        return self.golden is not None and self.golden.passed

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "bundle": None if self.bundle is None else str(self.bundle.path),
            "digest": None if self.bundle is None else self.bundle.digest,
            "passed": self.passed,
            "seconds": dict(self.seconds),
            "predicted": {"chip": self.forecast.chip.id} | prediction_json(self.forecast.decode),
            "gates": {name: gate_json(outcome) for name, outcome in self.gates.items()},
        }


def port(
    model: str | Path,
    *,
    recipe: str | Path | Recipe = "default",
    output: str | Path | None = None,
    context: int | None = None,
    bits: int | None = None,
    changes: Mapping[str, Any] | None = None,
    force: bool = False,
    rebuild: bool = False,
    progress: Progress = silent,
) -> PortResult:
    """Plan, build and judge a model.

    The first shard of every kind is compared with the Hugging Face model, and audited for
    residency, before the others are built. An interrupted port goes on where it stopped, unless
    `rebuild`; a finished bundle of the same model and recipe is kept and judged again.

    `model` is a Hugging Face folder, a GGUF file or a hub id. `context`, `bits` and `changes`
    replace values of the recipe (`make_request`). `output` is the bundle's folder, by default the
    model's name and the recipe's in the working directory; `force` replaces another bundle there.
    Raises CetaneError for what cannot be ported: nothing is left behind then.

    >>> result = cetane.port(model, recipe=recipe, output=bundle)
    >>> result.passed, list(result.gates)
    (True, ['golden'])
    """
    request = make_request(model, recipe, context, bits, changes)
    return port_request(request, output, force=force, rebuild=rebuild, progress=progress)


def port_request(
    request: Request,
    output: str | Path | None = None,
    *,
    force: bool = False,
    rebuild: bool = False,
    progress: Progress = silent,
) -> PortResult:
    """`port` of a request, whose plan can be shown before."""
    target, asked = request.target(output), request.planner  # refuses before any work
    recipe = resolve_recipe(request.checkpoint, request.recipe, progress)
    planner = Planner(request.checkpoint, recipe, asked)
    plan, speed = planner.plan(), forecast(planner)
    first = FirstShards(request.checkpoint, progress)
    clock = first.clock
    started = time.perf_counter()
    try:
        bundle = build(
            request.checkpoint, recipe, target,
            lambda what, done, total: progress(f"build {what}", done, total),
            force, first.judge, rebuild,
        )  # fmt: skip
    except FirstShardsFailed:
        return PortResult(plan, None, first.ladder, first.residency, None, speed, clock.seconds)
    clock.seconds["build"] = time.perf_counter() - started - sum(clock.seconds.values())
    for name, outcome in (("ladder", first.ladder), ("residency", first.residency)):
        if outcome is not None:
            bundle.write_gate(name, gate_json(outcome))
    with clock.stage("golden"):
        golden = judge(bundle, request.checkpoint, progress)
    return PortResult(plan, bundle, first.ladder, first.residency, golden, speed, clock.seconds)


def judge(bundle: Bundle, checkpoint: Checkpoint, progress: Progress = silent) -> GoldenResult:
    """Run the golden gate and keep its result in the bundle."""
    result = compare_with_model(
        bundle, checkpoint, lambda what, done, total: progress(f"golden gate: {what}", done, total)
    )
    bundle.write_gate("golden", gate_json(result))
    return result


def gate_json(outcome: Gate) -> dict[str, Any]:
    """A gate's outcome as a bundle keeps it."""
    if isinstance(outcome, Audit):
        return summary(outcome)
    assert isinstance(outcome, LadderResult | GoldenResult)
    return outcome.model_dump(mode="json")


@dataclass
class Clock:
    """Seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = time.perf_counter() - started


class FirstShardsFailed(Exception):
    """Stops a build whose first shards are wrong; never leaves this module."""


class FirstShards:
    """The gate of a build: judges the first shard of every kind before the others are made."""

    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self.checkpoint, self.progress = checkpoint, progress
        self.ladder: LadderResult | None = None
        self.residency: Audit | None = None
        self.clock = Clock()

    def judge(self, planner: Planner, packages: dict[str, Path]) -> None:
        """Compare and audit; FirstShardsFailed when they differ from the model."""
        self.progress("first shard of every kind, against the model", 0, 1)
        with self.clock.stage("ladder"):
            self.ladder = ladder(self.checkpoint, planner, packages)
        with self.clock.stage("residency"):
            programs = {name: load(path) for name, path in packages.items()}
            self.residency = audit(programs, Target())
        if not self.ladder.passed:
            raise FirstShardsFailed
