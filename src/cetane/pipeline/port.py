"""The whole way from a checkpoint to a bundle that is proved right."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.compress.selection import AUTO, UNFITTED
from cetane.errors import CetaneError
from cetane.files import Progress, claimed, disk_errors, silent
from cetane.gates.explain import Explanation
from cetane.gates.reference import forget_reference
from cetane.gates.residency.target import DEFAULT_OS, Target, oldest_system
from cetane.hardware.chips import DEFAULT_CHIP
from cetane.hardware.memory import give_back, keep_little
from cetane.pipeline.attempt import Attempt, PortHistory
from cetane.pipeline.build import check_place, same_apart_from_reasons
from cetane.pipeline.chip_layout import recipe_for_chip
from cetane.pipeline.clock import Clock
from cetane.pipeline.compression_choice import (
    DEFAULT_FORMAT,
    ROW_FORMAT,
    check_budget,
    resolutions,
    with_layout,
)
from cetane.pipeline.partial import Partial
from cetane.pipeline.port_result import PortResult, PortTarget
from cetane.pipeline.request import Request, make_request
from cetane.planner import Planner
from cetane.schema.changes import decided, override, value_of, without_reasons
from cetane.schema.recipe import Quality, Recipe
from cetane.tasks.workers import Workers, open_workers

MOST_ATTEMPTS = 4
"""Builds of one port: the first, and those after a change of the recipe."""


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

    - `model` is a Hugging Face folder, a GGUF file or a hub id.
    - `context`, `bits` and `changes` replace values of the recipe. `quality` is what is promised.
    - `budget` is the most that weights and tables may take ("300MB").
    - A port for a `chip` gets a layout for it, and must be predicted to be on its ANE, unless
      `require_residency` says otherwise. `os` is the chip's system, as iOS counts.
    - `lora` is the folder of a peft adapter that is merged into the model as it is read.
    - `adapters` are folders of such adapters by name. Each becomes functions beside the base's,
      which share its weights.
    - `text` is a file like what the port will read, on which few bits are fitted.
    - With `fix`, a red gate's own advice is taken, a few times.
    - `output` is the bundle's folder, by default the model's name and the recipe's in the working
      directory. `force` replaces another bundle there.
    - `workers` processes make the parts side by side, or those of Dask's `scheduler`. What is in
      the shared `store` is not made again (docs/how-to/workers.md).

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


def residency_for(chip: str | None, os: float, required: bool | None) -> PortTarget:
    """What is asked of residency: of a named chip all, unless `required` says otherwise.

    CetaneError for no such chip, and for a requirement without a chip.
    """
    if chip is None and required:
        raise CetaneError("residency can be required of a named chip only", "--chip a19-pro")
    target = Target(DEFAULT_CHIP if chip is None else chip, os)
    named = chip is not None
    return PortTarget(target, named, named if required is None else required)


def check_system(recipe: Recipe, asked: PortTarget) -> None:
    """CetaneError if the port must run on a system that does not load its programs."""
    oldest = oldest_system(recipe.target.deployment)
    if asked.required and asked.target.os < oldest:
        raise CetaneError(
            f"a port with target.deployment = '{recipe.target.deployment}' needs system {oldest} "
            f"or a newer one, not {asked.target.os:g}: older ones do not know its ops",
            f"--os {oldest}, or newer; --os 18 is iOS 18 or macOS 15, for which target.deployment "
            "is iOS18",
        )


def port_request(
    request: Request,
    output: str | Path | None,
    *,
    residency: PortTarget,
    fix: bool,
    force: bool,
    rebuild: bool,
    workers: Workers | None,
    progress: Progress,
) -> PortResult:
    """Port a request, as `port` does. The caller can show the request's plan before."""
    target = request.target(output)
    _ = request.planner  # refuses before any work
    check_system(request.recipe, residency)
    with one_reference():
        clock = Clock()
        choices = recipes_for(request, residency, progress)
        # Choosing may take minutes: a second port to this place is refused before it, not after.
        with claimed(target, f"porting {request.recipe.name}"):
            with disk_errors(target):
                Partial(target).resume()
            check_place(target, request.checkpoint, force)
            with clock.stage("choose"):
                first = next(choices)
        recipe, changes = (first, list[str]()) if force else earlier_choice(target, first, request)
        tried, kept = [first, recipe], recipe
        while True:
            attempt = Attempt(
                request=request, recipe=recipe, target=target, asked=residency,
                history=PortHistory(first=first, changes=tuple(changes)),
                clock=clock, progress=progress, workers=workers,
            )  # fmt: skip
            # After a change, the bundle there is the last attempt's, so it may be replaced.
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


def earlier_choice(target: Path, recipe: Recipe, request: Request) -> tuple[Recipe, list[str]]:
    """The recipe and the changes of an earlier run of this port, if its bundle is there. Else the
    recipe, and no changes.

    CetaneError if that bundle is beyond the budget.
    """
    before = PortHistory.of(target)
    if before is None or not same_apart_from_reasons(before.first, recipe):
        return recipe, []
    there = Bundle(target).plan.recipe
    planner = Planner(request.checkpoint, there, request.planner)
    check_budget(planner, request.budget, "the bundle there takes")
    return there, list(before.changes)


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

    Advice is taken with `fix`, or where user and recipe left the values to cetane. CetaneError for
    advice beyond the budget, or that does not fit the model.
    """
    if why.cause == "compression":
        for choice in choices:
            if not any(same_apart_from_reasons(choice, before) for before in tried):
                return choice
    recipe = tried[-1]
    if not why.mends or not (fix or is_open(request, recipe, why)):
        return None
    advised = mended(request, recipe, why)
    planner = Planner(request.checkpoint, advised, request.planner)
    check_budget(planner, request.budget, "what the gate advises takes")
    return advised


def is_open(request: Request, recipe: Recipe, why: Explanation) -> bool:
    """Whether a gate's advice changes only values that were left to cetane.

    These have a reason in the recipe, and the user named none but "auto". It never does if
    constants were fitted: the user asked for these few bits.
    """
    named = {key for key in request.named if value_of(request.recipe, key) != AUTO}
    return recipe.compression.fitted is None and recipe.reasons.keys() - named >= why.changes.keys()


def mended(request: Request, recipe: Recipe, why: Explanation) -> Recipe:
    """The recipe with the changes that a gate advises.

    Constants that were fitted to the old format are dropped: a new format cannot use them. With a
    new default, the names that a mix added to the request's go too. What was said of the old
    compression is not true of the new one.
    """
    if why.cause == "compression":
        recipe = without_reasons(recipe, (DEFAULT_FORMAT, ROW_FORMAT))
        if recipe.compression.fitted is not None:
            unfitted = dict(UNFITTED)
            if DEFAULT_FORMAT in why.changes:
                unfitted["names"] = request.recipe.compression.names
            values = {f"compression.{key}": value for key, value in unfitted.items()}
            recipe = override(recipe, values)
    return decided(recipe, why.changes, dict.fromkeys(why.changes, why.sentence))


def described(before: Recipe, after: Recipe, why: Explanation) -> str:
    """What changed between two attempts, and why."""
    keys = [key for key, reason in after.reasons.items() if before.reasons.get(key) != reason]
    values = ", ".join(f"{key} = {value_of(after, key)}" for key in keys)
    return f"{values}: {why.sentence}"
