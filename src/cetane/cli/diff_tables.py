"""Tables of a comparison of programs."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from cetane.cli.output import console, facts, say, show_warnings, table
from cetane.gates.diff import STAGES, ModelDiff
from cetane.hardware import LARGEST_FP16
from cetane.mil.comparison import DRIFT, Comparison, OpGap
from cetane.mil.gap import Gap
from cetane.pipeline.diff import DiffResult, worst_first


def show(result: DiffResult, top: int) -> None:
    """Print the agreement of shards and tables, then ops, then the verdict."""
    show_warnings(result.doubts)
    if result.model is not None:
        show_model(result.model)
    elif result.tables:
        show_gaps("host tables", result.tables)
    if result.parts:
        show_parts(result.parts, result.tolerance, top)
    word = "[bold green]they agree[/]" if result.passed else "[bold red]they differ[/]"
    tolerance, most = result.tolerance, DRIFT * result.tolerance
    console.print(f"diff: {word} (tolerance {tolerance:g} for one op, {most:g} for all together)")


def show_parts(parts: Mapping[str, Comparison], tolerance: float, top: int) -> None:
    """Print the origin of the error, the ops that add most, fp16's headroom, and the results."""
    places = {id(op): place for place, part in parts.items() for op in part.ops}
    ops = tuple(op for part in parts.values() for op in part.ops)
    firsts = {
        "first op that errs by itself": (part.first_own(tolerance) for part in parts.values()),
        "first op with a wrong result": (part.first_total(tolerance) for part in parts.values()),
    }
    shown: list[OpGap] = []
    for title, candidates in firsts.items():
        op = next(filter(None, candidates), None)
        if op is not None and op not in shown:
            show_op(f"{title} ({places[id(op)]})", op)
            shown.append(op)
    show_ops(ops, places, top)
    outputs = {f"{p} {n}": gap for p, part in parts.items() for n, gap in part.outputs.items()}
    show_gaps("outputs and states", outputs)
    for place, part in parts.items():
        for name, gap in part.own_outputs.items():
            if gap.relative > tolerance:
                say(f"{place} {name}: ops that only the second has change it by {gap.relative:.3g}")
    for side, alone in (
        ("first", [name for part in parts.values() for name in part.only_first]),
        ("second", [name for part in parts.values() for name in part.only_second]),
    ):
        if alone:
            more = f" and {len(alone) - top} more" if len(alone) > top else ""
            say(f"only in the {side}: {', '.join(alone[:top])}{more}")
    say(f"{len(ops)} results compared")


def show_ops(ops: tuple[OpGap, ...], places: Mapping[int, str], top: int) -> None:
    """Print the ops with the largest errors, and the ops with the largest values."""
    table(
        "ops by their own error",
        ["where", "op", "scope", "own", "total", "cause"],
        [
            [places[id(op)], f"{op.kind} {op.name}", op.scope, rounded(op.own.relative),
             rounded(op.total.relative), "; ".join(op.causes)]
            for op in worst_first(ops)[:top]
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


def rounded(value: float) -> float:
    """Three digits, to keep tables narrow."""
    return float(f"{value:.3g}")


def show_op(title: str, op: OpGap) -> None:
    """Print all facts about one op."""
    values: dict[str, Any] = {"op": f"{op.name} ({op.kind})", "scope": op.scope}
    if op.counterpart != op.name:
        values["is"] = op.counterpart
    for one in op.inputs:
        span = f"{one.low:.4g} to {one.high:.4g}"
        values[f"input {one.parameter}"] = f"{one.name} {list(one.shape)}, {span}"
    for what, gap in (("own error", op.own), ("total error", op.total)):
        values[what] = (
            f"relative {gap.relative:.3g}, max abs {gap.largest:.3g}, cosine {gap.cosine:.6f}"
        )
    shown = op.own if op.own.largest else op.total
    right, wrong = shown.values
    values["worst element"] = f"{list(shown.worst)}: {wrong:.6g}, should be {right:.6g}"
    values["cause"] = "; ".join(op.causes)
    facts(values, title)


def show_gaps(title: str, gaps: Mapping[str, Gap]) -> None:
    table(
        title,
        ["what", "relative", "max abs", "cosine"],
        [[name, gap.relative, gap.largest, gap.cosine] for name, gap in gaps.items()],
    )


def show_model(model: ModelDiff) -> None:
    """Print the agreement of every shard with the model, and the cause in the first wrong shard."""
    table(
        "shards, fed with the model's tensors",
        ["shard", "tensor", "relative", "max abs", "cosine"],
        [[h.shard, h.tensor, h.gap.relative, h.gap.largest, h.gap.cosine] for h in model.handed],
    )
    if model.suspect is not None:
        table(
            f"{model.suspect}, from the model to the finished package",
            ["after", "relative error"],
            [[stage.name, stage.relative] for stage in model.stages],
        )
        why = STAGES[model.cause] if model.cause else "no single stage exceeds the tolerance"
        say(f"cause: {why}")
