"""The stages of a function: graphs for onnxruntime, and the attentions between them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from cetane.mil.fast.attention_stage import AttentionStage, Operand, View
from cetane.mil.fast.context import ATTENTION, VIEW, Context
from cetane.mil.fast.translate import live_ops
from cetane.mil.program import Argument, Body, MilFunction, Op


def stages(function: MilFunction) -> list[MilFunction | AttentionStage]:
    """A function, cut at its attentions: functions and attentions that run in turn.

    The inputs of a stage are inputs of the function, and results of earlier stages. An op is in
    the first stage that has all of its inputs.
    """
    context = Context(function)
    ops = [op for op in live_ops(function) if not _free(context, op)]
    if not any(op.kind == ATTENTION for op in ops):
        return [function]
    levels: dict[str, int] = {}
    parts: dict[int, list[Op]] = defaultdict(list)
    for op in ops:
        level = max((levels.get(name, 0) for name in op.references()), default=0)
        parts[level].append(op)
        levels |= dict.fromkeys((n for n in op.references() if n in function.states), level)
        levels |= {value.name: level + (op.kind == ATTENTION) for value in op.outputs}
    result: list[MilFunction | AttentionStage] = []
    last = max(parts)
    for level in range(last + 1):
        own = [op for op in parts[level] if op.kind != ATTENTION]
        others = [op for at, some in parts.items() for op in some if at != level]
        others += [op for op in parts[level] if op.kind == ATTENTION]
        read = {name for op in others for name in op.references()} | set(function.body.outputs)
        given = [value.name for op in own for value in op.outputs if value.name in read]
        if level == last:
            given += [n for n in function.body.outputs if n not in levels]
        if own or given:
            result.append(_part(context, function, own, given))
        result += [_attention(context, op) for op in parts[level] if op.kind == ATTENTION]
    return result


def _free(context: Context, op: Op) -> bool:
    """Whether every stage that reads an op's results may have it: a constant, or a view."""
    fixed = bool(op.outputs) and all(value.name in context.constants for value in op.outputs)
    return fixed or op.kind == VIEW


def _part(
    context: Context, function: MilFunction, ops: list[Op], outputs: list[str]
) -> MilFunction:
    """The function of some ops, and of the constants and views that they read."""
    needed = {name for op in ops for name in op.references()} | set(outputs)
    free: list[Op] = []
    for op in reversed(function.ops):
        if _free(context, op) and any(value.name in needed for value in op.outputs):
            free.append(op)
            needed.update(op.references())
    body = Body((), (*reversed(free), *ops), tuple(outputs))
    made = {value.name for op in body.ops for value in op.outputs}
    outside = [name for name in sorted(needed) if name not in made]
    return replace(
        function,
        inputs={n: context.type(n) for n in outside if n not in function.states},
        outputs={name: context.type(name) for name in outputs},
        states={n: t for n, t in function.states.items() if n in needed},
        body=body,
    )


def _attention(context: Context, op: Op) -> AttentionStage:
    def named(parameter: str) -> tuple[Operand, ...]:
        return tuple(_operand(context, name) for name in op.inputs.get(parameter, ()))

    (rows,), (mask,) = named("rows"), named("mask")
    return AttentionStage(
        rows=rows,
        keys=named("keys"),
        values=named("values"),
        mask=mask,
        result=op.outputs[0].name,
        cap=float(context.plain(op, "cap", 0.0)),
        sinks=next(iter(named("sinks")), None),
        exact=bool(context.plain(op, "exact")),
    )


def _operand(context: Context, name: Argument) -> Operand:
    view = context.producer(name, VIEW)
    if view is None:
        return str(name)
    begin, end = context.plain(view, "begin"), context.plain(view, "end")
    return View(str(view.inputs["x"][0]), begin, end)
