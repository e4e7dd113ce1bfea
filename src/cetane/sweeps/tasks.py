"""A sweep's work as tasks: workers judge candidates, and the sweep finds them judged."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from cetane.checkpoint import Checkpoint
from cetane.compress import Selection, SensitivityFile, parse_format
from cetane.compress.sensitivity import SENSITIVITY
from cetane.errors import CetaneError
from cetane.files import read_json, remove, replacing, silent, write_json
from cetane.gates.residency.target import Target
from cetane.planner.weights import weight_count
from cetane.schema.manifest import producers
from cetane.schema.recipe import Recipe
from cetane.store.settings import shared_store
from cetane.store.store import Store, store_of_job
from cetane.sweeps import mixed
from cetane.sweeps.candidates import Candidate, candidate_of
from cetane.sweeps.grid import Way, parse_way
from cetane.sweeps.passage import Passage
from cetane.sweeps.points import LayerScore, Point
from cetane.sweeps.sweep import Sweep
from cetane.tasks.task import BASE_MEMORY, Task, task_key
from cetane.tasks.workers import Workers, performed, waiting
from cetane.validation import validated

FP16 = parse_format("fp16")
RESULT = "result.json"
ELEMENT = 4
"""Bytes of a weight while it is judged; a process holds all weights in fp32."""
FITTING_MEMORY = 6_000_000_000
"""Bytes of gradients and inputs while constants are fitted: SmolLM2-135M took 7.2 GB in all."""


@dataclass(frozen=True)
class SweepJob:
    """A sweep, in the form that workers get. Jobs with one key are equal."""

    key: str
    checkpoint: Checkpoint = field(compare=False)
    recipe: Recipe = field(compare=False)
    passage: Passage = field(compare=False)
    target: Target = field(compare=False)


class OpenedSweep:
    """A sweep of a worker, in a folder of its own."""

    def __init__(self, job: SweepJob) -> None:
        job.checkpoint.check_unchanged()
        self.scratch = tempfile.TemporaryDirectory(prefix="cetane-task-")
        folder = Path(self.scratch.name)
        self.sweep = Sweep(job.checkpoint, job.recipe, job.passage, job.target, folder, silent)

    def beside(self, selection: Selection, sensitivities: bytes | None) -> Selection:
        """A selection whose file of sensitivities is in this worker's folder."""
        if sensitivities is not None and selection.sensitivity is not None:
            path = self.sweep.folder / SENSITIVITY
            path.write_bytes(sensitivities)
            selection.sensitivity.find_at(path)
        return selection


@lru_cache(maxsize=1)
def opened(job: SweepJob) -> OpenedSweep:
    """The sweep that this process works on: its weights and the results of fp16 stay."""
    return OpenedSweep(job)


def make_sensitivities(job: SweepJob, folder: Path) -> None:
    """Measure the sensitivities of all weights."""
    sweep = opened(job).sweep
    file = sweep.sensitivities
    (folder / SENSITIVITY).write_bytes((sweep.folder / file.file).read_bytes())


def judge(job: SweepJob, candidate: Candidate, sensitivities: bytes | None, folder: Path) -> None:
    """Judge one candidate."""
    worker = opened(job)
    worker.beside(candidate.selection, sensitivities)
    write_json(folder / RESULT, worker.sweep.point(candidate).model_dump(mode="json"))


def judge_part(
    job: SweepJob,
    part: mixed.LayerPart,
    singles: Sequence[tuple[str, Selection]],
    sensitivities: bytes,
    folder: Path,
) -> None:
    """Measure the harm of some formats to one layer's weights of a kind."""
    worker = opened(job)
    for name, selection in singles:
        worker.beside(selection, sensitivities)
        worker.sweep.harm(part, parse_format(name), selection)
    lines = worker.sweep.scores.lines()
    mine = [line for line in lines if (line.layer, line.kind) == (part.layer, part.weight_kind)]
    scores = [line.model_dump(mode="json") for line in mine]
    write_json(folder / RESULT, {"scores": scores})


class SweepTasks:
    """The work of a sweep for its workers. What they have judged, the sweep knows."""

    def __init__(self, sweep: Sweep, workers: Workers) -> None:
        self.sweep, self.workers = sweep, workers
        self.own = sweep.folder / "tasks"
        self.judging: set[str] = set()
        """The keys of tasks that judge a candidate."""
        key = task_key(
            sweep.checkpoint.content, sweep.recipe.model_dump(mode="json"),
            [sweep.passage.calibration, sweep.passage.judged, sweep.passage.name],
            str(sweep.target), producers(),
        )  # fmt: skip
        assert sweep.checkpoint.fingerprint  # computed here and sent along, for workers to compare
        self.job = SweepJob(key, sweep.checkpoint, sweep.recipe, sweep.passage, sweep.target)
        self.memory = BASE_MEMORY + ELEMENT * weight_count(sweep.planner.blocks)

    def judge_ways(self, names: Sequence[str], mixing: bool) -> None:
        """Judge ways, and measure what mixes need."""
        ways = [parse_way(name) for name in names]
        tasks = list(self.point_tasks([way for way in ways if not way.form.weighted], None))
        weighted = [way for way in ways if way.form.weighted]
        if (weighted or mixing) and not self.sweep.has_sensitivities:
            work = partial(make_sensitivities, self.job)
            tasks.insert(0, self.task("sensitivities", work))
        self.perform(tasks)
        if weighted:
            self.perform(list(self.point_tasks(weighted, self.sweep.sensitivities)))
        if mixing:
            self.perform(list(self.part_tasks()))

    def point_tasks(
        self, ways: Sequence[Way], sensitivities: SensitivityFile | None
    ) -> Iterator[Task]:
        """A task for each way that is not judged yet. A way that the model refuses has none: the
        sweep itself says why."""
        for way in ways:
            try:
                candidate = candidate_of(way, self.sweep.planner, sensitivities)
            except CetaneError:
                continue
            if not self.sweep.knows(candidate):
                yield self.point_task(candidate)

    def part_tasks(self) -> Iterator[Task]:
        """A task for each part of the weights, with the harms to it that are not known."""
        content = self.sensitivities()
        for part in mixed.parts_of(self.sweep.planner):
            singles = [
                (form.name, selection)
                for form, selection in mixed.singles(part, self.sweep.mixed_base)
                if not self.sweep.knows_harm(selection)
            ]
            if singles:
                keyed = [[form, selection.model_dump(mode="json")] for form, selection in singles]
                work = partial(judge_part, self.job, part, singles, content)
                yield self.task(part.name, work, keyed)

    def judge_mixes(self, mixes: Sequence[Candidate]) -> None:
        """Judge mixes."""
        self.perform([self.point_task(mix) for mix in mixes if not self.sweep.knows(mix)])

    def point_task(self, candidate: Candidate) -> Task:
        """A candidate as a task."""
        selection = candidate.selection
        content = None if selection.sensitivity is None else self.sensitivities()
        work = partial(judge, self.job, candidate, content)
        fitting = 0 if selection.method == "plain" else FITTING_MEMORY
        task = self.task(candidate.name, work, selection.model_dump(mode="json"), more=fitting)
        self.judging.add(task.key)
        return task

    def sensitivities(self) -> bytes:
        file = self.sweep.sensitivities
        return (self.sweep.folder / file.file).read_bytes()

    def task(self, name: str, work: partial[None], *depends: object, more: int = 0) -> Task:
        """Some work as a task. `more` are bytes of memory beside those of judging."""
        key = task_key(self.job.key, name, *depends)
        return Task(name, key, work, self.memory + more, measured=True)

    def perform(self, tasks: list[Task]) -> None:
        """Have tasks performed, and note their results. A candidate that fails is refused."""
        store = shared_store() or store_of_job(self.own)
        done = 0
        try:
            if tasks:
                self.sweep.progress(waiting(tasks), done, len(tasks))
            for task, error in performed(self.workers, tasks, store, self.take):
                done += 1
                self.sweep.progress(task.name, done, len(tasks))
                if error is not None:
                    self.refuse(task, error)
        finally:
            remove(self.own)

    def refuse(self, task: Task, error: CetaneError) -> None:
        """Note a refused candidate. Raises other errors: if fp16 fails, the model is at fault."""
        if task.key not in self.judging or task.name == FP16.name:
            raise error
        self.sweep.refused[task.name] = error.message

    def take(self, task: Task, store: Store) -> bool:
        """Note a task's result; False if the store has none. CetaneError for another result."""
        with store.opened(task.key, self.own / "fetched") as made:
            if made is None:
                return False
            if (made / SENSITIVITY).is_file():
                with replacing(self.sweep.folder / SENSITIVITY) as temporary:
                    (made / SENSITIVITY).rename(temporary)
                return True
            content = read_json(made / RESULT)
            if "scores" in content:
                for score in validated(list[LayerScore], content["scores"], task.name):
                    self.sweep.scores.append(score)
            else:
                self.sweep.points.append(validated(Point, content, task.name))
        return True
