"""cetane sweep: how small a model can be made, and what that costs."""

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from cetane.checkpoint import open_checkpoint
from cetane.cli.output import (
    Json,
    Model,
    RecipeName,
    console,
    errors,
    megabytes,
    print_json,
    progress,
    table,
)
from cetane.errors import CetaneError
from cetane.hardware.chips import find_chip
from cetane.schema.recipe import load_recipe
from cetane.sweep.grid import chosen, load_grid, weights
from cetane.sweep.plot import plot
from cetane.sweep.points import Point
from cetane.sweep.search import CompressionSweep, Passage, best, pareto, write_recipe

TEXT = "english.txt"


def sweep(
    model: Model,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Judge on this text: first sensitivities, then points.", show_default="our own"
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="The size to choose a point for: 4.25 bits a weight, or 60MB.",
            show_default="that of palette4-kmeans-group32",
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            help="Only formats of this name or pattern, of all that there are; '*' is all."
        ),
    ] = None,
    chip: Annotated[str, typer.Option(help="Predict speed and residency on this chip.")] = "m4-max",
    recipe: RecipeName = "default",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder.", show_default="NAME-sweep")
    ] = None,
    json: Json = False,
) -> None:
    """Judge many compressions of a model on a text, without building one, and choose.

    Run again after an interruption: what is known is kept. Writes the points, a plot, and the
    chosen point as a recipe.
    """
    names, found = chosen(formats or []), find_chip(chip)
    checkpoint, base = open_checkpoint(model), load_recipe(recipe)
    passage = Passage.cut(*read(text), checkpoint)
    folder = output or Path(f"{Path(model).resolve().stem}-sweep")
    with progress("sweep") as update:
        work = CompressionSweep(checkpoint, base, passage, found, folder, update)
        size = budget_bytes(budget, work)
        points = []
        for index, name in enumerate(names):
            update(name, index, len(names))
            point = work.format(name)
            points += [point] if point is not None else []
        if not formats or budget:
            sizes = [size, *(work.plain_size(name) for name in load_grid().mixed.sizes)]
            points += work.mixes(sizes)
        update("done", len(names), len(names))
    for name, reason in work.refused.items():
        errors.print(f"left out: {name}: {reason}", markup=False, soft_wrap=True)
    pick = best(points, size + work.rest)
    written = plot(points, pick, folder)
    if pick is not None:
        written.append(write_recipe(work, pick))
    if json:
        front = {point.key for point in pareto(points)}
        rows = [p.model_dump(mode="json") | {"pareto": p.key in front} for p in points]
        print_json({
            "folder": str(folder), "budget_bytes": size + work.rest, "points": rows,
            "chosen": None if pick is None else pick.name,
            "refused": work.refused, "files": [str(path) for path in written],
        })  # fmt: skip
        return
    show(points, pick)
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if pick is None:
        smallest = min(p.weight_bytes for p in points)
        console.print(
            f"no point has at most {megabytes(size + work.rest)}; the smallest has "
            f"{megabytes(smallest)}"
        )
    else:
        console.print(f"next: cetane port {model} -r {written[-1]}", markup=False, soft_wrap=True)


def read(path: Path | None) -> tuple[str, str]:
    """The name and content of the text; CetaneError if it cannot be read."""
    if path is None:
        own = resources.files("cetane") / "data" / "texts" / TEXT
        return TEXT, own.read_text(encoding="utf-8")
    try:
        return path.name, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CetaneError(f"cannot read {path}: {error}") from error


def budget_bytes(budget: str | None, work: CompressionSweep) -> int:
    """Bytes of the weights that formats are for; CetaneError for what is no size."""
    if budget is None:
        return work.plain_size(load_grid().mixed.sizes[0])
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(MB)?", budget)
    if match is None or not float(match[1]):
        raise CetaneError(f"--budget {budget}: no size", "write bits a weight, 4.25, or 60MB")
    if match[2]:
        return int(float(match[1]) * 1e6) - work.rest
    return int(float(match[1]) * sum(w.elements for w in weights(work.planner)) / 8)


def show(points: Sequence[Point], pick: Point | None) -> None:
    """All points, the largest first; those of the Pareto front marked."""
    front = {point.key for point in pareto(points)}
    rows: list[list[Any]] = []
    for p in sorted(points, key=lambda p: (-p.weight_bytes, p.kl)):
        mark = "chosen" if pick is not None and p.key == pick.key else "*" if p.key in front else ""
        right = sum(a.expected for a in p.smoke if a.expected is not None)
        asked = sum(a.expected is not None for a in p.smoke)
        rows.append([
            mark, p.name, f"{p.weight_bytes / 1e6:.1f}", f"{p.bits_per_weight:.2f}",
            f"{p.perplexity:.2f}", f"{p.kl:.4f}", f"{p.top1:.1%}", f"{right}/{asked}",
            f"{p.predicted.tok_s:.0f}",
        ])  # fmt: skip
    first = points[0]
    title = (
        f"{first.text.tokens} tokens of {first.text.name}; *: no point is smaller and nearer to "
        f"fp16; tok/s are predicted for {first.predicted.chip}"
    )
    columns = ["", "point", "MB", "bits", "perplexity", "KL", "top-1", "smoke", "tok/s"]
    table(title, columns, rows)
    for p in points:
        if p.predicted.weights_off_ane:
            errors.print(
                f"predicted: {p.predicted.weights_off_ane:.0%} of the weights of {p.name} are read "
                f"off the ANE: {', '.join(p.predicted.rules)}",
                markup=False, soft_wrap=True,
            )  # fmt: skip
    for p in sorted(points, key=lambda p: -p.weight_bytes):
        said = " | ".join(" ".join(answer.text.split())[:60] for answer in p.smoke)
        console.print(f"{p.name}: {said}", markup=False, highlight=False, soft_wrap=True)
