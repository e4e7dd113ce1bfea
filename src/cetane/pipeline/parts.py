"""The parts of a bundle, and each as a task: made here or by a worker, with the same bytes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from cetane.bundle.rows import ROW_FORMATS
from cetane.checkpoint import Checkpoint
from cetane.checkpoint.names import model_name
from cetane.lower.lower import Lowering
from cetane.lower.package import EXPORTER
from cetane.pipeline.stored_bundles import bundle_key
from cetane.planner import Planner
from cetane.schema.manifest import TOKENIZER, rotary_path, shard_path, table_path
from cetane.schema.recipe import Recipe, recipe_files
from cetane.tasks.task import BASE_MEMORY, Task, task_key

TABLE_ELEMENTS = 1 << 24
"""Elements of a host table that are in memory at a time."""


@dataclass(frozen=True)
class BuildJob:
    """A build, in the form that workers get. Jobs with one key are equal."""

    key: str
    checkpoint: Checkpoint = field(compare=False)
    recipe: Recipe = field(compare=False)


def job_of(checkpoint: Checkpoint, recipe: Recipe) -> BuildJob:
    """The build of a checkpoint and a resolved recipe."""
    assert checkpoint.fingerprint  # computed here and sent along: workers compare their files to it
    return BuildJob(bundle_key(checkpoint, recipe), checkpoint, recipe)


def task_of(job: BuildJob, name: str, weight_bytes: int) -> Task:
    """A part as a task. Its result has the part's path in the bundle.

    `weight_bytes` are those of the part, since the task declares its memory.
    """
    work = partial(make_part, job, name)
    return Task(name, task_key(job.key, name), work, BASE_MEMORY + weight_bytes)


def make_part(job: BuildJob, name: str, folder: Path) -> None:
    """Write one part into a folder, at the part's path in the bundle."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    opened(job)[name](path)


@lru_cache(maxsize=1)
def opened(job: BuildJob) -> dict[str, Callable[[Path], None]]:
    """How to write each part, by path. A process keeps one build open: its parts share conversions.

    CetaneError if the checkpoint's files are not those of the job.
    """
    job.checkpoint.check_unchanged()
    planner = Planner(job.checkpoint, job.recipe)
    return parts(planner, job.checkpoint, lowering_of(planner, job.checkpoint))


def lowering_of(planner: Planner, checkpoint: Checkpoint) -> Lowering:
    """The lowering of a build. Packages name the model that they were made of."""
    named = {EXPORTER: model_name(checkpoint.source, checkpoint.config)}
    return Lowering(planner, checkpoint, named)


def parts(
    planner: Planner, checkpoint: Checkpoint, lowering: Lowering
) -> dict[str, Callable[[Path], None]]:
    """The parts of a bundle: by path, a function that writes the part to a place."""

    plan, tables = planner.plan(), planner.model.tables
    known = {"tokens": planner.model.embedding, **{n: t.table for n, t in tables.items()}}
    embeddings = {name: table for name, table in known.items() if name in plan.tables}
    row_format = ROW_FORMATS[planner.recipe.embedding.rows]

    def rows(name: str, part: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            table, size = embeddings[name], plan.tables[name]
            dtype, shape = row_format.stored(size)[part]
            step = max(1, TABLE_ELEMENTS // size.channels)
            with path.open("wb") as file:
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
                for start in range(0, size.rows, step):
                    read = table.read(checkpoint, start, min(start + step, size.rows)).numpy()
                    file.write(row_format.encode(read)[part].tobytes())

        return write

    def rotary(table: str) -> Callable[[Path], None]:
        def write(path: Path) -> None:
            rows = planner.model.rotary[table].cos_sin(planner.recipe.cache.context)
            with path.open("wb") as file:
                np.save(file, rows.numpy())

        return write

    def tokenizer(path: Path) -> None:
        path.mkdir()
        checkpoint.tokenizer.save(path)

    def shard(name: str) -> Callable[[Path], None]:
        return lambda path: lowering.lower(name, path)

    return (
        {table_path(name, part): rows(name, part)
         for name in embeddings for part in row_format.stored(plan.tables[name])}
        | {TOKENIZER: tokenizer} | recipe_files(planner.recipe)
        | {rotary_path(table): rotary(table) for table in planner.model.rotary}
        | {shard_path(name): shard(name) for name in planner.members}
    )  # fmt: skip
