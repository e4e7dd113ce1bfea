"""The assembly of a bundle: its parts are made, judged and put together."""

import logging
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.files import (
    Progress,
    check_space,
    json_sha256,
    remove,
    replacing,
    size_of,
    write_json,
)
from cetane.pipeline.partial import Partial
from cetane.pipeline.parts import BuildJob, job_of, lowering_of, parts, task_of
from cetane.pipeline.stored_bundles import origins, publish
from cetane.planner import Planner, tags
from cetane.schema.manifest import MANIFEST, Manifest, producers, shard_path
from cetane.schema.recipe import Recipe
from cetane.store.settings import shared_store
from cetane.store.store import Store
from cetane.tasks.task import Task, code_version
from cetane.tasks.workers import Workers, performed, waiting

log = logging.getLogger("cetane.build")

FirstShardsGate = Callable[[Planner, dict[str, Path]], None]
"""Called with the packages of the first shard of every kind, by name; raises to stop the build."""


class Build:
    """The parts of one bundle, and how far it has come."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipe: Recipe,
        target: Path,
        rebuild: bool,
        workers: Workers | None = None,
    ) -> None:
        self.checkpoint, self.recipe, self.target = checkpoint, recipe, target
        self.rebuild, self.workers = rebuild, workers
        self.planner = Planner(checkpoint, recipe)
        if recipe.head.subset is not None:
            recipe.head.subset.check(checkpoint.tokenizer)
        self.lowering = lowering_of(self.planner, checkpoint)
        self.store = None if rebuild else shared_store()
        self.partial = Partial(target)
        self.jobs = parts(self.planner, checkpoint, self.lowering)

    def make(
        self, names: list[str], progress: Progress, gate: FirstShardsGate | None = None
    ) -> None:
        """Make some parts; those that are there already are kept, unless all are made anew."""
        self.partial.start(build_key(self.checkpoint, self.recipe))
        check_space(self.partial.root, self.space())
        if self.rebuild:
            self.partial.forget(names)
        if made := len(self.partial.noted(names)):
            log.info(
                "an earlier build left %d of %d parts in %s: this one makes the rest",
                made, len(names), self.partial.root,
            )  # fmt: skip
        first = {shard_path(shards[0]): shards[0] for shards in self.lowering.kinds().values()}
        later = [name for name in names if name.startswith("shards/") and name not in first]
        sooner = [name for name in names if name not in later]
        failed = self._make(sooner, lambda name, done: progress(name, done, len(names)))
        if gate is not None:
            refuse(failed)  # the gate judges all first shards, so none may be missing
            gate(self.planner, {shard: self.partial.bundle / p for p, shard in first.items()})
        failed |= self._make(
            later, lambda name, done: progress(name, len(sooner) + done, len(names))
        )
        refuse(failed)
        progress("done", len(names), len(names))

    def space(self) -> int:
        """Bytes of disk that the rest of the build needs at most.

        These are the bytes of the missing parts, and twice those of the largest shard: its template
        and its stamped package lie beside each other while it is made.
        """
        plan = self.planner.plan()
        there = size_of(self.partial.bundle)
        largest = max(shard.weight_bytes for shard in plan.shards)
        added = sum(adapter.weight_bytes for adapter in plan.adapters.values())
        wanted = plan.weight_bytes + added + plan.embedding_bytes
        return max(0, wanted - there) + 2 * (largest + added)

    def _make(
        self, names: list[str], progress: Callable[[str, int], None]
    ) -> dict[str, CetaneError]:
        """Make parts; one that fails does not keep the others from being made. Returns what went
        wrong, by part."""
        ended = (self._one_by_one if self.workers is None else self._by_workers)(names, progress)
        return {name: error for name, error in ended if error is not None}

    def _one_by_one(
        self, names: list[str], progress: Callable[[str, int], None]
    ) -> Iterator[tuple[str, CetaneError | None]]:
        for done, name in enumerate(names):
            progress(name, done)
            try:
                if not self._known(name):
                    with replacing(self.partial.bundle / name) as temporary:
                        self.jobs[name](temporary)
                    made = self.partial.record(name)
                    if self.store is not None:
                        self.store.publish(self.task(name).key, self.partial.bundle, made)
            except CetaneError as error:
                yield name, error

    def _by_workers(
        self, names: list[str], progress: Callable[[str, int], None]
    ) -> Iterator[tuple[str, CetaneError | None]]:
        assert self.workers is not None
        store = self.store or Store(self.partial.store, private=True)
        tasks = [self.task(name) for name in names if not self._known(name)]
        done = len(names) - len(tasks)
        if tasks:
            progress(waiting(tasks), done)
        for task, error in performed(self.workers, tasks, store, self._take):
            done += 1
            progress(task.name, done)
            yield task.name, error

    def _known(self, name: str) -> bool:
        """Whether a part is there, or comes from the shared store."""
        if self.partial.has(name):
            return True
        return self.store is not None and self._take(self.task(name), self.store)

    def _take(self, task: Task, store: Store) -> bool:
        """Put a part from a store into the bundle; False if the store does not have it."""
        with store.opened(task.key, self.partial.root / "fetched") as result:
            if result is None or not (result / task.name).exists():
                return False
            remove(self.partial.bundle / task.name)
            (result / task.name).rename(self.partial.bundle / task.name)
        self.partial.record(task.name)
        return True

    def task(self, name: str) -> Task:
        """A part as a task."""
        return task_of(self.job, name, self.weight_bytes.get(name, 0))

    @cached_property
    def weight_bytes(self) -> dict[str, int]:
        """Bytes of each shard's weights, by path."""
        return {shard_path(shard.name): shard.weight_bytes for shard in self.planner.plan().shards}

    @cached_property
    def job(self) -> BuildJob:
        """This build, in the form that workers get."""
        return job_of(self.checkpoint, self.recipe)

    def finish(self, asked: Recipe) -> None:
        """Write the manifest and move the folder to the bundle's place. The shared store gets the
        bundle too, under the key of the recipe that was `asked` for."""
        manifest = Manifest(
            producer=producers(),
            plan=self.planner.plan(),
            tags=tags(self.planner),
            files=self.partial.files(),
            **origins(self.checkpoint),
        )
        if self.store is not None:
            publish(self.store, self.checkpoint, asked, self.partial.bundle, manifest)
        write_json(self.partial.bundle / MANIFEST, manifest.model_dump(mode="json"))
        self.partial.replace()


def refuse(failures: dict[str, CetaneError]) -> None:
    """Raise what went wrong, if anything did."""
    if len(failures) == 1:
        raise next(iter(failures.values()))
    if failures:
        names: dict[str, list[str]] = {}
        for name, error in failures.items():  # one cause, such as a full disk, may have many
            names.setdefault(error.message, []).append(name)
        listed = "; ".join(f"{', '.join(failed)}: {cause}" for cause, failed in names.items())
        raise CetaneError(
            f"{len(failures)} parts failed: {listed}",
            "what was made is kept: mend the cause and run the same command again",
        )


def build_key(checkpoint: Checkpoint, recipe: Recipe) -> str:
    """The key of a partial build: a hash of its checkpoint, its recipe, the code and the tools."""
    made_by = [producers(), code_version()]
    content = [checkpoint.fingerprint, recipe.model_dump(mode="json"), made_by]
    return json_sha256(content)
