"""The whole way from a checkpoint to a bundle that is proved right."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.compress.select import UNFITTED
from cetane.errors import CetaneError
from cetane.files import Progress, silent
from cetane.gates.explain import Explanation, explain, explain_ladder, explain_residency
from cetane.gates.golden import GoldenResult
from cetane.gates.golden import golden as compare_with_model
from cetane.gates.ladder import LadderResult, ladder
from cetane.gates.reference import forget_reference
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.store import InBundle, summary
from cetane.gates.residency.target import DEFAULT_OS, Target
from cetane.hardware.chips import DEFAULT_CHIP
from cetane.hardware.memory import give_back, keep_little
from cetane.mil.reader import load
from cetane.pipeline.build import build, check_place, same
from cetane.pipeline.chip_layout import recipe_for_chip
from cetane.pipeline.choose import check_budget, resolutions, with_layout
from cetane.pipeline.plan import Forecast, forecast, forecast_json
from cetane.pipeline.request import Request, make_request
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Quality, Recipe, decided, override, value_of
from cetane.tasks.workers import Workers, open_workers
from cetane.validation import Data, validated

MOST_ATTEMPTS = 4
"""Builds of one port: the first, and those after a change of the recipe."""
HISTORY = "history"
"""The file of a port's history, among a bundle's gates."""


class Gate(Protocol):
    """What every gate's outcome tells."""

    @property
    def passed(self) -> bool: ...


@dataclass(frozen=True)
class PortTarget:
    """Where a port shall run, and whether its ops must be predicted to be on the ANE there."""

    target: Target = field(default_factory=Target)
    named: bool = False
    """Whether the user named the chip."""
    required: bool = False


@dataclass(frozen=True)
class PortResult:
    """How a port went. A gate that fails is part of the result, not an exception."""

    plan: Plan
    bundle: Bundle | None
    """None when the first shards failed their gate: the others were not built."""
    ladder: LadderResult | None
    """The first shard of every kind against the model; None for a bundle that was there before."""
    residency: Audit | None
    """Where the ops of those shards are predicted to run. None for a bundle that was there before,
    unless residency is required."""
    golden: GoldenResult | None
    """The finished bundle against the model; None when there is no bundle."""
    explanation: Explanation | None
    """Why a gate is red, and what mends it; None where none is."""
    forecast: Forecast
    """How fast the chip is predicted to run the plan."""
    seconds: Mapping[str, float]
    """Wall-clock seconds by stage: `choose`, `build` (without the gates), `ladder`, `residency`,
    `golden`."""
    residency_required: bool = False
    """Whether the port is for a named chip, and must be predicted to be on its ANE."""
    changes: tuple[str, ...] = ()
    """What was changed after a red gate, and why: one line each."""
    refused: str | None = None
    """Why the next change was not tried: it exceeds the budget, or does not fit the model."""
    warnings: tuple[str, ...] = ()
    """Signs of a misread checkpoint."""

    @property
    def gates(self) -> dict[str, Gate]:
        """The outcomes of the gates that ran, by name."""
        named = {"ladder": self.ladder, "residency": self.residency, "golden": self.golden}
        return {name: outcome for name, outcome in named.items() if outcome is not None}

    @property
    def off_the_ane(self) -> bool:
        """Whether residency is required, and not predicted."""
        return self.residency_required and self.residency is not None and not self.residency.passed

    @property
    def passed(self) -> bool:
        """Whether the bundle is right, and on the ANE where that is required."""
        return self.golden is not None and self.golden.passed and not self.off_the_ane

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "bundle": None if self.bundle is None else str(self.bundle.path),
            "digest": None if self.bundle is None else self.bundle.digest,
            "passed": self.passed,
            "seconds": dict(self.seconds),
            "explanation": explanation_json(self.explanation),
            "reasons": dict(self.plan.recipe.reasons),
            "changes": list(self.changes),
            "refused": self.refused,
            "warnings": list(self.warnings),
            "residency_required": self.residency_required,
            "predicted": forecast_json(self.forecast),
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
    chip: str | None = None,
    os: float = DEFAULT_OS,
    require_residency: bool | None = None,
    quality: Quality | None = None,
    budget: str | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    text: str | Path | None = None,
    fix: bool = False,
    force: bool = False,
    rebuild: bool = False,
    workers: int | None = None,
    scheduler: str | None = None,
    store: str | None = None,
    progress: Progress = silent,
) -> PortResult:
    """Plan, build and judge a model.

    What the recipe leaves to cetane is chosen first. The first shard of every kind is compared with
    the Hugging Face model, and audited for residency, before the others are built. Unless
    `rebuild`, an interrupted port goes on where it stopped, and a finished bundle of the same model
    and recipe is kept and judged again.

    `model` is a Hugging Face folder, a GGUF file or a hub id. `context`, `bits` and `changes`
    replace values of the recipe (`make_request`); `quality` is what is promised, `budget` the most
    that weights and tables may take ("300MB"). A port for a `chip` gets a layout for it, and must
    be predicted to be on its ANE, unless `require_residency` says otherwise. `os` is the chip's
    system, as iOS counts. With `fix`, a red gate's own advice is taken, a few times.
    `lora` is the folder of a peft adapter that is merged into the model as it is read. `adapters`
    are folders of such adapters by name: each becomes functions beside the base's, which share its
    weights. `text` is a file like what the port will read, on which few bits are fitted. `output`
    is the bundle's folder, by default the model's name and the recipe's in the working directory;
    `force` replaces another bundle there. `workers` processes make the parts side by side, or those
    of Dask's `scheduler`; what is in the shared `store` is not made again (docs/how-to/workers.md).
    Raises CetaneError for what cannot be ported: nothing is left behind then.

    >>> result = cetane.port(model, recipe=recipe, output=bundle)
    >>> result.passed, list(result.gates)
    (True, ['golden'])
    """
    promised = {} if quality is None else {"quality": quality}
    request = make_request(
        model, recipe, context, bits, promised | dict(changes or {}), budget, lora, adapters, text
    )
    asked = residency_for(chip, os, require_residency)
    with open_workers(workers, scheduler, store) as opened:
        return port_request(
            request, output, residency=asked, fix=fix, force=force, rebuild=rebuild,
            workers=opened, progress=progress,
        )  # fmt: skip


def residency_for(
    chip: str | None, os: float = DEFAULT_OS, required: bool | None = None
) -> PortTarget:
    """What is asked of residency: of a named chip all, unless `required` says otherwise.

    CetaneError for no such chip, and for a requirement without a chip.
    """
    if chip is None and required:
        raise CetaneError("residency can be required of a named chip only", "--chip a19-pro")
    target = Target(chip or DEFAULT_CHIP, os)
    named = chip is not None
    return PortTarget(target, named, named if required is None else required)


def port_request(
    request: Request,
    output: str | Path | None = None,
    *,
    residency: PortTarget | None = None,
    fix: bool = False,
    force: bool = False,
    rebuild: bool = False,
    workers: Workers | None = None,
    progress: Progress = silent,
) -> PortResult:
    """Port a request, as `port` does. The caller can show the request's plan before."""
    target = request.target(output)
    _ = request.planner  # refuses before any work
    check_place(target, request.checkpoint, force)
    with one_reference():
        clock = Clock()
        asked = residency or PortTarget()
        choices = recipes_for(request, asked, progress)
        with clock.stage("choose"):
            recipe = next(choices)
        tried, changes = [recipe], list[str]()
        before = None if force else History.of(target)
        if before is not None and same(before.first, recipe):
            recipe, changes = Bundle(target).plan.recipe, list(before.changes)
            tried.append(recipe)
        kept = recipe
        while True:
            history = History(first=tried[0], changes=tuple(changes))
            attempt = Attempt(request, recipe, target, asked, history, clock, progress, workers)
            result = attempt.run(force or recipe is not kept, rebuild)
            warned = () if request.warning is None else (request.warning,)
            result = replace(result, changes=tuple(changes), warnings=warned)
            why = result.explanation
            if result.passed or why is None or len(changes) + 1 == MOST_ATTEMPTS:
                return result
            try:
                following = next_recipe(request, why, choices, tried, fix)
            except CetaneError as error:  # beyond the budget, or advice that does not fit the model
                return replace(result, refused=error.message)
            if following is None:
                return result
            recipe = following
            tried.append(recipe)
            changes.append(described(result.plan.recipe, recipe, why))
            progress(f"again: {changes[-1]}", 0, 1)


@contextmanager
def one_reference() -> Iterator[None]:
    """A context whose gates share the Hugging Face model. Its weights are freed at the end."""
    keep_little()
    try:
        yield
    finally:
        forget_reference()
        give_back()


def recipes_for(request: Request, asked: PortTarget, progress: Progress) -> Iterator[Recipe]:
    """The request's recipe with its open values chosen, once for each compression of `resolutions`.
    Each has a layout for the chip, if one is named."""
    for recipe in resolutions(request.checkpoint, request.recipe, progress, request.budget):
        planner = Planner(request.checkpoint, recipe, request.planner)
        if asked.named:
            yield recipe_for_chip(planner, asked.target, request.named)
        else:
            yield with_layout(recipe)


def next_recipe(
    request: Request,
    why: Explanation,
    choices: Iterator[Recipe],
    tried: Sequence[Recipe],
    fix: bool,
) -> Recipe | None:
    """The recipe to build after a red gate. It is the next choice where the compression is at
    fault, else the last recipe as the gate advises; None if there is neither.

    Advice is taken with `fix`, or where the recipe left the values to cetane. CetaneError for
    advice beyond the budget, or that does not fit the model.
    """
    if why.cause == "compression":
        for choice in choices:
            if not any(same(choice, before) for before in tried):
                return choice
    recipe = tried[-1]
    if not why.mends or not (fix or is_open(recipe, why)):
        return None
    advised = mended(recipe, why)
    planner = Planner(request.checkpoint, advised, request.planner)
    check_budget(planner, request.budget, "what the gate advises takes")
    return advised


def is_open(recipe: Recipe, why: Explanation) -> bool:
    """Whether a gate's advice changes only values that the recipe left to cetane. It never does if
    constants were fitted: the user asked for these few bits."""
    return recipe.compression.fitted is None and recipe.reasons.keys() >= why.changes.keys()


def mended(recipe: Recipe, why: Explanation) -> Recipe:
    """The recipe with the changes that a gate advises. Constants that were fitted to the old format
    are dropped: a new format cannot use them."""
    if recipe.compression.fitted is not None and why.cause == "compression":
        recipe = override(recipe, {f"compression.{key}": value for key, value in UNFITTED.items()})
    return decided(recipe, why.changes, dict.fromkeys(why.changes, why.sentence))


def described(before: Recipe, after: Recipe, why: Explanation) -> str:
    """What changed between two attempts, and why."""
    keys = [key for key, reason in after.reasons.items() if before.reasons.get(key) != reason]
    values = ", ".join(f"{key} = {value_of(after, key)}" for key in keys)
    return f"{values}: {why.sentence}"


@dataclass
class Attempt:
    """One build of a port, and its gates."""

    request: Request
    recipe: Recipe
    target: Path
    asked: PortTarget
    history: "History"
    clock: "Clock"
    progress: Progress
    workers: Workers | None = None

    def run(self, force: bool, rebuild: bool) -> PortResult:
        """Build and judge. Parts that were built of the same recipe before are kept, unless
        `rebuild`; `force` replaces another bundle at the target."""
        request, clock, progress = self.request, self.clock, self.progress
        planner = Planner(request.checkpoint, self.recipe, request.planner)
        plan, speed = planner.plan(), forecast(planner, self.asked.target.chip)
        first = FirstShards(request.checkpoint, self.asked, clock, progress)
        judged_before = sum(clock.seconds.values())
        started = time.perf_counter()
        try:
            bundle = build(
                request.checkpoint, self.recipe, self.target,
                lambda what, done, total: progress(f"build {what}", done, total),
                force, first.judge, rebuild, self.workers,
            )  # fmt: skip
        except FirstShardsFailed:
            return PortResult(
                plan, None, first.ladder, first.residency, None, first.explain(plan), speed,
                clock.seconds, self.asked.required,
            )  # fmt: skip
        spent = time.perf_counter() - started
        clock.add("build", spent - (sum(clock.seconds.values()) - judged_before))
        if first.residency is None and self.asked.required:
            first.audit(InBundle(bundle).packages)
        self.history.keep(bundle)
        for name, outcome in (("ladder", first.ladder), ("residency", first.residency)):
            if outcome is not None:
                bundle.write_gate(name, gate_json(outcome))
        with clock.stage("golden"):
            golden, why = judge(bundle, request.checkpoint, progress)
        return PortResult(
            plan, bundle, first.ladder, first.residency, golden, why or first.explain(plan),
            speed, clock.seconds, self.asked.required,
        )  # fmt: skip


class History(Data):
    """How a port came to its bundle's recipe. It lies beside the gates' results if a gate was red.

    When the same port runs again, the history tells it that the bundle is its own.
    """

    first: Recipe
    """The first recipe that was built."""
    changes: tuple[str, ...]
    """What was changed after a red gate, and why: one line each."""

    @classmethod
    def of(cls, target: Path) -> "History | None":
        """The history of the bundle at `target`; None without a bundle or a red gate."""
        kept = Bundle(target).gates().get(HISTORY) if target.exists() else None
        if kept is None:
            return None
        content = {key: value for key, value in kept.items() if key != "bundle"}
        return validated(cls, content, f"{target}: {HISTORY}.json", "--force replaces the bundle")

    def keep(self, bundle: Bundle) -> None:
        """Write it, if there is something to tell."""
        if self.changes:
            bundle.write_gate(HISTORY, self.model_dump(mode="json"))


def judge(
    bundle: Bundle, checkpoint: Checkpoint, progress: Progress = silent
) -> tuple[GoldenResult, Explanation | None]:
    """Run the golden gate, keep its result in the bundle, and say why it is red if it is."""
    result = compare_with_model(
        bundle, checkpoint, lambda what, done, total: progress(f"golden gate: {what}", done, total)
    )
    bundle.write_gate("golden", gate_json(result))
    if not result.passed:
        progress("golden gate: what is wrong", 0, 1)
    return result, explain(bundle, checkpoint, result)


def explanation_json(explanation: Explanation | None) -> dict[str, Any] | None:
    """Why a gate is red, as a JSON object."""
    return None if explanation is None else explanation.model_dump(mode="json")


def gate_json(outcome: Gate) -> dict[str, Any]:
    """A gate's outcome as a bundle keeps it."""
    if isinstance(outcome, Audit):
        return summary(outcome)
    assert isinstance(outcome, LadderResult | GoldenResult)
    return outcome.model_dump(mode="json")


@dataclass
class Clock:
    """Seconds by stage, of all attempts."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A context whose seconds are counted. What it freed goes back to the system."""
        started = time.perf_counter()
        try:
            yield
        finally:
            give_back()
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count some seconds more."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds


class FirstShardsFailed(Exception):
    """Stops a build whose first shards are refused; never leaves this module."""


class FirstShards:
    """The gate of a build: judges the first shard of every kind before the others are made."""

    def __init__(
        self, checkpoint: Checkpoint, asked: PortTarget, clock: Clock, progress: Progress
    ) -> None:
        self.checkpoint, self.asked = checkpoint, asked
        self.clock, self.progress = clock, progress
        self.ladder: LadderResult | None = None
        self.residency: Audit | None = None

    def judge(self, planner: Planner, packages: dict[str, Path]) -> None:
        """Audit the first shards, and compare them with the model. FirstShardsFailed if they leave
        the ANE and must not, or if they differ."""
        self.audit(packages)
        if self.refused is not None:
            raise FirstShardsFailed
        self.progress("first shard of every kind, against the model", 0, 1)
        with self.clock.stage("ladder"):
            self.ladder = ladder(self.checkpoint, planner, packages)
        if not self.ladder.passed:
            raise FirstShardsFailed

    def audit(self, packages: Mapping[str, Path]) -> None:
        """Predict where the ops of some packages run."""
        with self.clock.stage("residency"):
            programs = {name: load(path) for name, path in packages.items()}
            self.residency = audit(programs, self.asked.target)

    @property
    def refused(self) -> Audit | None:
        """The audit, if it is one that refuses the port."""
        audited = self.residency
        return None if audited is None or audited.passed or not self.asked.required else audited

    def explain(self, plan: Plan) -> Explanation | None:
        """Why the first shards were refused; None if they were not."""
        if self.refused is not None:
            return explain_residency(self.refused, plan)
        if self.ladder is not None and not self.ladder.passed:
            return explain_ladder(self.ladder, plan.recipe)
        return None
