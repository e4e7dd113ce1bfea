"""cetane diff: the first op where two programs part."""

from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated, Any

import typer

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.output import Json, console, print_json, progress, table
from cetane.errors import CetaneError
from cetane.gates.diff import STAGES, AgainstModel, ModelDiff, compare_bundles
from cetane.mil import MilFunction, Program, load
from cetane.mil.compare import DRIFT, TOLERANCE, Comparer, Comparison, OpGap
from cetane.mil.executor import compile
from cetane.mil.gap import Gap
from cetane.mil.inputs import random_inputs, read_inputs
from cetane.mil.program import LARGEST_FP16, Precision, listed
from cetane.schema.manifest import MANIFEST
from cetane.schema.recipe import Mode

Parts = dict[str, Comparison]
"""Comparisons by where: a function, or a shard and a function."""


def diff(
    first: Annotated[Path, typer.Argument(help="The side that is right: a package or a bundle.")],
    second: Annotated[
        Path | None, typer.Argument(help="What to compare with it; the same again, if none.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Compare the bundle with this checkpoint's model instead.")
    ] = None,
    function: Annotated[
        str | None,
        typer.Option(
            help="A function of the packages, a mode of the bundles.", show_default="main"
        ),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(help="How the second side runs; the first runs in fp32.", show_default="fp32"),
    ] = None,
    inputs: Annotated[
        Path | None, typer.Option(help="An .npz with an array for each input; else random ones.")
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, help=f"Relative error of one op that means nothing; {DRIFT} times that add up."
        ),
    ] = TOLERANCE,
    top: Annotated[int, typer.Option(min=1, help="How many ops to list.")] = 10,
    json: Json = False,
) -> None:
    """Compare two programs op by op, or a bundle with its model: the first op where they part.

    Exit code 1 if anything is off by more than the tolerance.
    """
    if model is None and second is None and precision is None:
        raise CetaneError(
            f"nothing to compare {first} with",
            "name a second package or bundle, a --model, or --precision fp16",
        )
    chosen = precision or "fp32"
    bundles = (first / MANIFEST).is_file()
    if not bundles and model is not None:
        raise CetaneError(f"{first} is not a bundle", "--model judges a bundle")
    if bundles and inputs is not None:
        raise CetaneError("--inputs is for packages", "a bundle's inputs come from the engine")
    if model is not None and (second, precision) != (None, None):
        raise CetaneError("--model compares one bundle, in fp32 and in fp16: leave out the rest")
    result: dict[str, Any] = {"tolerance": tolerance}
    parts: Parts
    passed = True
    if model is not None:
        found = against_model(first, model, function, tolerance)
        parts = where(found.comparisons)
        passed = found.suspect is None
        result |= {"handed": [asdict(h) for h in found.handed], "suspect": found.suspect,
                   "stages": [asdict(s) for s in found.stages], "cause": found.cause}  # fmt: skip
        if not json:
            show_model(found)
    elif bundles:
        comparisons, tables = bundle_pair(first, second or first, function, chosen)
        parts = where(comparisons)
        passed = all(gap.relative <= tolerance for gap in tables.values())
        result["tables"] = {name: asdict(gap) for name, gap in tables.items()}
        if not json:
            show_gaps("host tables", tables)
    else:
        parts = package_pair(first, second or first, function, chosen, inputs)
    passed = passed and not any(part.parted(tolerance) for part in parts.values())
    if json:
        shown = {place: content(part, tolerance, top) for place, part in parts.items()}
        print_json({"passed": passed} | result | {"parts": shown})
    else:
        if parts:
            show(parts, tolerance, top)
        verdict = "[bold green]they agree[/]" if passed else "[bold red]they part[/]"
        console.print(f"diff: {verdict} (tolerance {tolerance:g})", highlight=False)
    raise typer.Exit(0 if passed else 1)


def package_pair(
    first: Path, second: Path, function: str | None, precision: Precision, inputs: Path | None
) -> Parts:
    """Compare a function of two packages."""
    one, other = (pick(load(path), function) for path in (first, second))
    with progress("diff") as update:
        update("loading", 0, 2)
        comparer = Comparer(compile(one, "fp32"), compile(other, precision))
        update("running", 1, 2)
        given = random_inputs(one) if inputs is None else read_inputs(inputs, one)
        result = comparer(given)
        update("done", 2, 2)
    return {one.name: result}


def pick(program: Program, name: str | None) -> MilFunction:
    wanted = name or program.default
    if wanted not in program.functions:
        raise CetaneError(
            f"{program.path}: no function {wanted!r}; it has {listed(program.functions)}"
        )
    return program.functions[wanted]


def bundle_pair(
    first: Path, second: Path, function: str | None, precision: Precision
) -> tuple[Any, dict[str, Gap]]:
    """Compare all shards of two bundles."""
    one, other = opened(first), opened(second)
    with progress("diff") as update:
        return compare_bundles(one, other, mode(one, function), precision, update)


def against_model(path: Path, model: str, function: str | None, tolerance: float) -> ModelDiff:
    """Compare all shards of a bundle with the model."""
    bundle = opened(path)
    with progress("diff") as update:
        update("reading the model", 0, 1)
        against = AgainstModel(bundle, open_checkpoint(model), mode(bundle, function))
        return against.run(tolerance, update)


def opened(path: Path) -> Bundle:
    bundle = Bundle(path)
    bundle.verify()
    return bundle


def mode(bundle: Bundle, name: str | None) -> Mode:
    """A mode of a bundle by name; without one, the widest."""
    modes = bundle.plan.modes
    for known in modes:
        if known == name:
            return known
    if name is not None:
        raise CetaneError(f"{bundle.path}: no mode {name!r}; it has {listed(modes)}")
    return max(modes, key=lambda m: modes[m].tokens)


def where(comparisons: dict[tuple[str, str], Comparison]) -> Parts:
    return {f"{shard}/{function}": found for (shard, function), found in comparisons.items()}


def content(part: Comparison, tolerance: float, top: int) -> dict[str, Any]:
    """A comparison as JSON."""
    own, total = part.first_own(tolerance), part.first_total(tolerance)
    return {
        "compared": len(part.ops),
        "first_own": own and described(own),
        "first_total": total and described(total),
        "ops": [described(op) for op in ranked(part.ops)[:top]],
        "largest": [described(op) for op in sorted(part.ops, key=lambda o: -o.largest)[:top]],
        "outputs": {name: asdict(gap) for name, gap in part.outputs.items()},
        "only_first": part.only_first,
        "only_second": part.only_second,
    }


def described(op: OpGap) -> dict[str, Any]:
    return asdict(op) | {"causes": op.causes}


def ranked(ops: tuple[OpGap, ...]) -> list[OpGap]:
    """By their own error, the worst first."""
    return sorted(ops, key=lambda op: -op.own.relative)


def show(parts: Parts, tolerance: float, top: int) -> None:
    """Print where the error is born, the ops that add most, fp16's headroom, and the results."""
    places = {id(op): place for place, part in parts.items() for op in part.ops}
    ops = tuple(op for part in parts.values() for op in part.ops)
    firsts = {
        "first op that errs by itself": (part.first_own(tolerance) for part in parts.values()),
        "first op that is off": (part.first_total(tolerance) for part in parts.values()),
    }
    shown: list[OpGap] = []
    for title, found in firsts.items():
        op = next(filter(None, found), None)
        if op is not None and op not in shown:
            show_op(f"{title} ({places[id(op)]})", op)
            shown.append(op)
    table(
        "ops by their own error",
        ["where", "op", "scope", "own", "total", "cause"],
        [
            [places[id(op)], f"{op.kind} {op.name}", op.scope, rounded(op.own.relative),
             rounded(op.total.relative), "; ".join(op.causes)]
            for op in ranked(ops)[:top]
        ],
    )  # fmt: skip
    halves = sorted((op for op in ops if op.half), key=lambda op: -op.largest)[:top]
    if halves:
        table(
            f"largest values (fp16 ends at {LARGEST_FP16:.0f})",
            ["where", "op", "scope", "largest", "headroom", "overflows"],
            [
                [places[id(op)], f"{op.kind} {op.name}", op.scope, op.largest,
                 rounded(LARGEST_FP16 / op.largest) if op.largest else inf, op.total.overflowed]
                for op in halves
            ],
        )  # fmt: skip
    outputs = {f"{p} {n}": gap for p, part in parts.items() for n, gap in part.outputs.items()}
    show_gaps("outputs", outputs)
    for side, alone in (
        ("first", [name for part in parts.values() for name in part.only_first]),
        ("second", [name for part in parts.values() for name in part.only_second]),
    ):
        if alone:
            more = f" and {len(alone) - top} more" if len(alone) > top else ""
            text = f"only in the {side}: {', '.join(alone[:top])}{more}"
            console.print(text, markup=False, highlight=False)
    console.print(f"{len(ops)} results compared")


def rounded(value: float) -> float:
    """Three digits, to keep tables narrow."""
    return float(f"{value:.3g}")


def show_op(title: str, op: OpGap) -> None:
    """Print all about one op."""
    rows: list[list[Any]] = [["op", f"{op.name} ({op.kind})"], ["scope", op.scope]]
    if op.counterpart != op.name:
        rows.append(["is", op.counterpart])
    rows += [
        [f"input {i.parameter}", f"{i.name} {list(i.shape)}, {i.low:.4g} to {i.high:.4g}"]
        for i in op.inputs
    ]
    rows += [
        [what, f"relative {g.relative:.3g}, max abs {g.largest:.3g}, cosine {g.cosine:.6f}"]
        for what, g in (("own error", op.own), ("total error", op.total))
    ]
    right, wrong = op.own.values
    rows.append(["worst element", f"{list(op.own.worst)}: {wrong:.6g}, should be {right:.6g}"])
    rows += [["cause", cause] for cause in op.causes]
    table(title, ["what", "value"], rows)


def show_gaps(title: str, gaps: dict[str, Gap]) -> None:
    table(
        title,
        ["what", "relative", "max abs", "cosine"],
        [[name, gap.relative, gap.largest, gap.cosine] for name, gap in gaps.items()],
    )


def show_model(found: ModelDiff) -> None:
    """Print how every shard agrees with the model, and what made the first one part."""
    table(
        "shards, fed with the model's tensors",
        ["shard", "tensor", "relative", "max abs", "cosine"],
        [[h.shard, h.tensor, h.gap.relative, h.gap.largest, h.gap.cosine] for h in found.handed],
    )
    if found.suspect is not None:
        table(
            f"{found.suspect}, from the model to the finished package",
            ["after", "relative error"],
            [[stage.name, stage.relative] for stage in found.stages],
        )
        why = STAGES[found.cause] if found.cause else "no single stage is beyond the tolerance"
        console.print(f"cause: {why}", highlight=False)
