"""The lab's work as tasks: the bundle of an arm, and one measure of an experiment."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from secrets import token_hex

from cetane.files import Progress, read_json, remove, silent, write_json
from cetane.lab.experiment import ArmName, Experiment
from cetane.lab.journal import ArmOutcome
from cetane.lab.metrics import PLANNED, TIMED
from cetane.lab.run import ArmOutcomes, measure_names, take
from cetane.lab.sides import Sides
from cetane.lab.workload import Setting
from cetane.mil.fast import share_threads
from cetane.store.settings import shared_store
from cetane.store.store import Store, store_of_job
from cetane.tasks.task import Task, task_key
from cetane.tasks.workers import Workers, performed, waiting
from cetane.threads import processors
from cetane.validation import validated

RESULT = "result.json"
MEMORY = 2_500_000_000
"""Bytes of a process with torch, a bundle and a reference of the lab's small models."""


@dataclass(frozen=True)
class LabJob:
    """An experiment, in the form that workers get. Jobs with one key are equal."""

    key: str
    experiment: Experiment = field(compare=False)
    setting: Setting = field(compare=False)


@lru_cache(maxsize=1)
def opened(job: LabJob) -> Sides:
    """The sides of the experiment that this process works on."""
    share_threads()
    return Sides(job.experiment, job.setting, silent)


def build_arm(job: LabJob, arm: ArmName, folder: Path) -> None:
    """Build the bundle of an arm, unless it is there."""
    write_json(folder / RESULT, {"digest": opened(job).by_arm[arm].bundle.digest})


def measure(job: LabJob, name: str, folder: Path) -> None:
    """Take one measure of both arms."""
    part = take(opened(job), name)
    content = {arm: outcome.model_dump(mode="json") for arm, outcome in part.items()}
    write_json(folder / RESULT, content)


@dataclass
class SharedTask:
    """A task, and the experiments that it is for."""

    task: Task
    experiments: list[str]


class LabTasks:
    """The work of some experiments for workers.

    A bundle is built once, however many experiments compare it. Times are measured at the end, with
    nothing beside them.
    """

    def __init__(
        self,
        experiments: Sequence[Experiment],
        setting: Setting,
        workers: Workers,
        progress: Progress,
    ) -> None:
        self.experiments = {one.id: one for one in experiments}
        self.workers, self.progress = workers, progress
        self.setting = Setting(setting.folder.absolute(), setting.models)
        self.own = self.setting.folder / f"tasks-{os.getpid()}"
        self.key = token_hex(16)
        """A key of this run alone: no measure is taken from another run."""
        self.errors: dict[str, Exception] = {}
        self.parts: dict[str, list[ArmOutcomes]] = {name: [] for name in self.experiments}
        self.arms: dict[str, SharedTask] = {}
        self.measures: list[SharedTask] = []
        self.measured: dict[str, str] = {}
        """The experiment of each task that measures, by the task's key."""
        self.done = 0

    def run(self) -> Iterator[tuple[Experiment, Callable[[], Iterator[ArmOutcomes]]]]:
        """Every experiment with its findings, as soon as they are there."""
        for experiment in self.experiments.values():
            try:
                self.plan(experiment)
            except Exception as error:  # becomes this experiment's outcome
                self.errors[experiment.id] = error
        self.measures.sort(key=lambda shared: shared.task.alone)
        left = dict.fromkeys(self.experiments, 0)
        for shared in self.measures:
            left[shared.experiments[0]] += 1
        for _ in self.perform(list(self.arms.values())):
            pass
        for shared in self.perform(self.measures):
            name = shared.experiments[0]
            left[name] -= 1
            if not left[name]:
                yield self.experiments.pop(name), partial(self.gathered, name)
        for name, experiment in self.experiments.items():
            yield experiment, partial(self.gathered, name)

    def gathered(self, name: str) -> Iterator[ArmOutcomes]:
        """What an experiment's measures say. Raises the error of a task that failed."""
        if name in self.errors:
            raise self.errors[name]
        yield from self.parts[name]

    def plan(self, experiment: Experiment) -> None:
        """Note the tasks of an experiment."""
        names = measure_names(experiment)
        job = LabJob(task_key(self.key, experiment.id), experiment, self.setting)
        sides = Sides(experiment, self.setting, silent)
        if experiment.workload is not None:
            self.setting.text(experiment.workload)  # written once, before workers want it
        for arm, side in sides.by_arm.items():
            if set(names) - PLANNED:
                work = partial(build_arm, job, arm)
                name = f"{side.recipe.name} {side.key[:8]}"
                task = Task(name, task_key(self.key, side.key), work, MEMORY)
                self.arms.setdefault(side.key, SharedTask(task, [])).experiments.append(
                    experiment.id
                )
        for name in names:
            timed = name in TIMED
            task = Task(
                name=f"{experiment.id}: {name}",
                key=task_key(job.key, name),
                work=partial(measure, job, name),
                memory=MEMORY,
                cores=processors() if timed else 1,
                alone=timed,
                measured=True,
            )
            self.measures.append(SharedTask(task, [experiment.id]))
            self.measured[task.key] = experiment.id

    def perform(self, wanted: Sequence[SharedTask]) -> Iterator[SharedTask]:
        """Have tasks performed, but for experiments that failed already. Gives each as it ends."""
        failed = self.errors.keys()
        todo = {one.task.key: one for one in wanted if not set(one.experiments) <= failed}
        tasks = [one.task for one in todo.values()]
        total = len(self.arms) + len(self.measures)
        store = shared_store() or store_of_job(self.own)
        try:
            if tasks:
                self.progress(waiting(tasks), self.done, total)
            for task, error in performed(self.workers, tasks, store, self.take):
                self.done += 1
                self.progress(task.name, self.done, total)
                shared = todo[task.key]
                if error is not None:
                    self.errors |= dict.fromkeys(shared.experiments, error)
                yield shared
        finally:
            remove(self.own)

    def take(self, task: Task, store: Store) -> bool:
        """Note a task's result; False if the store has none."""
        with store.opened(task.key, self.own / "fetched") as result:
            if result is None:
                return False
            content = read_json(result / RESULT)
        if (experiment := self.measured.get(task.key)) is not None:
            part = validated(dict[ArmName, ArmOutcome], content, task.name)
            self.parts[experiment].append(part)
        return True
