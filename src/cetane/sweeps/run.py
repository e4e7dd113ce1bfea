"""A whole sweep: judges many compressions of a model, and chooses one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.files import Progress, claimed, remove, silent
from cetane.gates.residency.target import DEFAULT_OS, Target
from cetane.hardware.chips import DEFAULT_CHIP
from cetane.pipeline.request import NUMBER, make_request, read_size
from cetane.schema.manifest import MANIFEST
from cetane.schema.recipe import RECIPE, Recipe
from cetane.sweeps.grid import load_grid, ways_named
from cetane.sweeps.passage import Passage, text_or_english
from cetane.sweeps.plot import plot
from cetane.sweeps.points import Point, best, pareto
from cetane.sweeps.sizes import Sizes
from cetane.sweeps.sweep import Sweep, write_recipe
from cetane.sweeps.tasks import SweepTasks
from cetane.tasks.workers import Workers, open_workers

log = logging.getLogger("cetane.sweeps")


@dataclass(frozen=True)
class Budget:
    """The size of the point that is chosen: bits a weight, or bytes of weights and tables."""

    bits: float = 0.0
    bytes: int = 0

    @classmethod
    def read(cls, text: str) -> Budget:
        """A budget that a user wrote. CetaneError for what is no size."""
        if re.fullmatch(NUMBER, text) and float(text):
            return cls(bits=float(text))
        with suppress(CetaneError):  # its hint knows no bits
            return cls(bytes=read_size(text))
        raise CetaneError(
            f"--budget {text}: not a size", "write bits a weight, 4.25, or a size, 60MB"
        )

    def size(self, sizes: Sizes) -> int:
        """The bytes of the weights that formats are for."""
        if self.bytes:
            return self.bytes - sizes.beside
        return int(self.bits * sizes.elements / 8)


@dataclass(frozen=True)
class SweepResult:
    """Compressions judged on one text, and the best of a size."""

    folder: Path
    points: Sequence[Point]
    chosen: Point | None
    """The point nearest to fp16 within the budget; None if every point is larger."""
    budget_bytes: int
    """The budget for weights and tables, in bytes, as `port` counts it."""
    budget_asked: bool
    """Whether the user asked for that budget: else it judges nothing."""
    table_bytes: int
    """Bytes of the host's tables, in the recipe's format: every point has these too."""
    refused: Mapping[str, str]
    """The reasons why ways or mixes could not be judged, by name."""
    files: Sequence[Path]
    """The plots, then the chosen point as a recipe."""

    @property
    def passed(self) -> bool:
        """Whether a point is as small as the user asks."""
        return self.chosen is not None or not self.budget_asked

    @property
    def recipe(self) -> Path | None:
        """The chosen point as a recipe that `port` takes."""
        return self.files[-1] if self.chosen is not None else None

    @property
    def front(self) -> list[Point]:
        """The points that no other beats in both size and quality, largest first."""
        return pareto(self.points)

    def as_json(self) -> dict[str, Any]:
        front = {point.key for point in self.front}
        return {
            "folder": str(self.folder),
            "budget_bytes": self.budget_bytes,
            "table_bytes": self.table_bytes,
            "points": [p.model_dump(mode="json") | {"pareto": p.key in front} for p in self.points],
            "chosen": None if self.chosen is None else self.chosen.name,
            "refused": dict(self.refused),
            "files": [str(path) for path in self.files],
        }


def sweep(
    model: str | Path,
    *,
    text: Path | None = None,
    budget: str | None = None,
    formats: Sequence[str] = (),
    chip: str = DEFAULT_CHIP,
    os: float = DEFAULT_OS,
    recipe: str | Path | Recipe = "default",
    lora: str | Path | None = None,
    output: str | Path | None = None,
    workers: int | Workers | None = None,
    scheduler: str | None = None,
    store: str | None = None,
    progress: Progress = silent,
) -> SweepResult:
    """Judge compressions of a model on a text, without building one.

    - `text` is a file of plain text; by default a text that ships.
    - `budget` is the size of the chosen point: bits a weight ("4.25"), or megabytes of weights and
      tables ("60MB").
    - `formats` are names or patterns.
    - Speed and residency are predicted for `chip`, with the system `os` (its iOS number).
    - `lora` is merged into the model.
    - The folder `output` keeps all results, so that another sweep continues from there.
    - `workers`, `scheduler` and `store` are as in `port`.

    CetaneError for a text that is unreadable or too short, an unknown format, or a `budget` that is
    no size. So it is for an `output` that is a bundle, and for a chip without a rate at which it
    reads weights.
    """
    if output and (Path(output) / MANIFEST).is_file():
        raise CetaneError(
            f"{output} is a bundle, which holds no files of a sweep", "choose another folder"
        )
    names, target = ways_named(formats), Target(chip, os)
    wanted = None if budget is None else Budget.read(budget)
    request = make_request(model, recipe, lora=lora)
    passage = Passage.cut(*text_or_english(text), request.checkpoint)
    folder = Path(output) if output else Path(f"{request.name}-sweep")
    with open_workers(workers, scheduler, store) as crew, claimed(folder, "sweeping"):
        work = Sweep(request.checkpoint, request.recipe, passage, target, folder, progress)
        return run_sweep(work, names, wanted, not formats or wanted is not None, crew)


def run_sweep(
    work: Sweep,
    names: Sequence[str],
    budget: Budget | None,
    mixing: bool,
    crew: Workers | None = None,
) -> SweepResult:
    """The points of some ways, and of mixes if they are wanted; plots and a recipe.

    Without a budget, the chosen point is of the first size of the grid. A crew judges all points
    first, so that the sweep finds them judged.
    """
    sizes, progress, mixed = work.sizes, work.progress, load_grid().mixed.sizes
    size = sizes.of_way(mixed[0]) if budget is None else budget.size(sizes)
    if judged := sum(map(work.knows_way, names)):
        log.info("an earlier sweep judged %d of %d ways in %s", judged, len(names), work.folder)
    tasks = None if crew is None else SweepTasks(work, crew)
    if tasks is not None:
        tasks.judge_ways(names, mixing)
    found = []
    for index, name in enumerate(names):
        progress(name, index, len(names))
        found.append(work.way(name))
    if mixing:
        mixes = work.mixes([size, *(sizes.of_way(name) for name in mixed)])
        if tasks is not None:
            tasks.judge_mixes(mixes)
        found += [work.mix(mix) for mix in mixes]
    points = [point for point in found if point is not None]
    progress("done", len(names), len(names))
    chosen = best(points, size + sizes.rest)
    files = plot(points, chosen, work.folder)
    if chosen is None:
        remove(work.folder / RECIPE)  # an earlier sweep's, perhaps of another model
    else:
        files.append(write_recipe(work, chosen))
    return SweepResult(
        work.folder, points, chosen, size + sizes.beside, budget is not None, sizes.tables,
        work.refused, files,
    )  # fmt: skip
