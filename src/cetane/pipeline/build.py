"""Checkpoint and recipe to bundle, shard by shard; a build that was stopped goes on.

Its imports are few: a bundle that comes from a shared store needs neither torch nor coremltools.
"""

import logging
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.files import Progress, claimed, disk_errors, remove
from cetane.pipeline.partial import Partial, read_note
from cetane.pipeline.request import Request
from cetane.pipeline.stored_bundles import fetched
from cetane.schema.manifest import MANIFEST, shard_path
from cetane.schema.recipe import Recipe
from cetane.store.settings import shared_store

if TYPE_CHECKING:
    from cetane.pipeline.assembly import FirstShardsGate
    from cetane.tasks.workers import Workers

log = logging.getLogger("cetane.build")


def build(
    checkpoint: Checkpoint,
    recipe: Recipe,
    target: Path,
    progress: Progress,
    force: bool = False,
    gate: "FirstShardsGate | None" = None,
    rebuild: bool = False,
    workers: "Workers | None" = None,
) -> Bundle:
    """Build a bundle at `target`; a finished one of the same checkpoint and recipe is kept.

    The first shard of every kind comes first, and `gate` judges them before the others are made.
    With `rebuild` the bundle is made anew, without anything that an interrupted build left.
    `workers` make the parts side by side, with the same bytes. With a shared store, a bundle that
    is there is not made again, and neither is a part.

    Raises CetaneError if `target` holds something else, unless `force`, and if a part failed. The
    other parts are made nevertheless, and stay for the next attempt. With a `gate`, a part that
    failed before the judgement stops the build there.
    """
    with claimed(target, f"building {recipe.name}"):
        partial = Partial(target)
        with disk_errors(target):
            partial.resume()
        check_place(target, checkpoint, force)
        if not target.exists() and gate is None and not rebuild and (store := shared_store()):
            with disk_errors(target):
                if fetched(store, checkpoint, recipe, target):
                    log.info("%s comes from the store: nothing was built", target)
                    return Bundle(target)
        from cetane.pipeline.assembly import Build
        from cetane.pipeline.compression_choice import resolve_recipe

        assert Request(checkpoint, recipe).planner  # what cannot be built is refused before work
        chosen = resolve_recipe(checkpoint, recipe, progress)
        if target.exists() and not force:
            if not same_apart_from_reasons(Bundle(target).plan.recipe, chosen):
                raise another_bundle(target)
            if not rebuild:
                return existing(partial, checkpoint)
        work = Build(checkpoint, chosen, target, rebuild, workers)
        with disk_errors(work.partial.bundle):
            work.make(list(work.jobs), progress, gate)
            work.finish(recipe)
    return Bundle(target)


def build_only(
    checkpoint: Checkpoint,
    recipe: Recipe,
    target: Path,
    patterns: list[str],
    progress: Progress,
    rebuild: bool = False,
) -> dict[str, Path]:
    """Make only the shards whose names match a pattern; a later build takes them up.

    Returns their packages by name. Raises CetaneError for a pattern that matches none.
    """
    from cetane.pipeline.assembly import Build
    from cetane.pipeline.compression_choice import resolve_recipe

    work = Build(checkpoint, resolve_recipe(checkpoint, recipe, progress), target, rebuild)
    known = list(work.planner.members)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise CetaneError(f"--only {pattern}: no such shard", f"there are {', '.join(known)}")
    chosen = [n for n in known if any(fnmatchcase(n, pattern) for pattern in patterns)]
    with claimed(target, f"building {recipe.name}"), disk_errors(work.partial.bundle):
        work.make([shard_path(name) for name in chosen], progress)
    return {name: work.partial.bundle / shard_path(name) for name in chosen}


def existing(partial: Partial, checkpoint: Checkpoint) -> Bundle:
    """A finished bundle of the same checkpoint and recipe; CetaneError if it is damaged."""
    bundle = Bundle(partial.target)
    bundle.verify()
    from cetane.pipeline.assembly import build_key

    mine = (None, build_key(checkpoint, bundle.plan.recipe))
    if partial.ours and read_note(partial.key) in mine:
        remove(partial.root)  # left by a kill between the last two steps of this build
    log.info("%s is there from an earlier build: it is kept", partial.target)
    return bundle


def check_place(target: Path, checkpoint: Checkpoint, force: bool) -> None:
    """CetaneError for a target that no build of this checkpoint may take: better now than after the
    choosing."""
    if not target.exists():
        return
    if not (target / MANIFEST).is_file():
        raise CetaneError(
            f"{target} exists and is not a bundle, so --force does not replace it either",
            "choose another --output",
        )
    if not force and Bundle(target).manifest.fingerprint != checkpoint.fingerprint:
        raise another_bundle(target)


def another_bundle(target: Path) -> CetaneError:
    """The error for a target with a bundle that this build may not replace."""
    return CetaneError(
        f"{target} is a bundle of another checkpoint or recipe", "--force replaces it"
    )


def same_apart_from_reasons(one: Recipe, other: Recipe) -> bool:
    """Whether two recipes are equal apart from their `reasons`."""
    return one.model_copy(update={"reasons": other.reasons}) == other
