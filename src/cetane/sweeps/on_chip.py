"""Predictions for a compression: the speed of a step, and the residency of its weights.

The residency rules are asked about a program of only weights and the convolutions that read them.
All other ops are the same for every format, and `cetane port` audits those of the bundle.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from cetane.compress import Format
from cetane.compress.formats import Fp16, Linear, Palette
from cetane.families import Weight
from cetane.gates.residency.audit import audit, weights_off_ane
from cetane.gates.residency.target import Target
from cetane.mil.program import (
    Body,
    MilFunction,
    NamedValue,
    Op,
    Program,
    StoredConstant,
    TensorType,
)
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.sweeps.points import Predicted


def predict(planner: Planner, predictor: Predictor, target: Target) -> Predicted:
    """The speed of decoding on the predictor's chip, and the residency of weights on a target."""
    step = predictor.predict(planner, "decode")
    audited = audit(programs(planner), target)
    findings = [f for function in audited.functions for f in function.findings]
    return Predicted(
        chip=predictor.chip.id,
        decode_ms=step.ms,
        tok_s=step.tok_s,
        binds=step.binds,
        weights_off_ane=weights_off_ane(audited.functions),
        rules=tuple(dict.fromkeys(f.rule for f in findings)),
    )


def programs(planner: Planner) -> dict[str, Program]:
    """A program for every shard, which reads each of its weights once, with one column."""
    made = {}
    for shard, blocks in planner.members.items():
        ops: list[Op] = []
        inputs: dict[str, TensorType] = {}
        for block in blocks:
            for path, weight in block.weights():
                if weight.kind:
                    name = f"{block.name}.{path}"
                    form = planner.recipe.compression.format_for(weight.name, weight.kind)
                    inputs[f"{name}_x"] = TensorType((1, weight.shape[1], 1, 1), "fp16")
                    ops += reading(name, weight, form)
        outputs = {op.outputs[0].name: TensorType((1,), "fp16") for op in ops if op.kind == "conv"}
        states = {
            state.name: TensorType(state.shape, "fp16")
            for graph in planner.graphs(shard)
            for state in graph.function.states
        }
        body = Body((), tuple(ops), tuple(outputs))
        function = MilFunction("decode", inputs, outputs, states, body)
        made[shard] = Program(Path(shard), {"decode": function})
    return made


def reading(name: str, weight: Weight, form: Format) -> Iterator[Op]:
    """The ops of a constant, and of a convolution with it."""
    dense = TensorType(weight.shape, "fp16")
    value = NamedValue(f"{name}_w", dense)
    ones = (1,) * (len(weight.shape) - 1)
    parts: dict[str, tuple[str | StoredConstant, ...]]
    match form:
        case Fp16():
            yield Op("const", value.name, {"val": (stored(weight.shape, "fp16"),)}, (value,))
        case Linear():
            parts = {
                "data": (stored(weight.shape, f"int{form.bits}"),),
                "scale": (stored(form.scales(weight.shape), "fp16"),),
            }
            yield Op("constexpr_blockwise_shift_scale", value.name, parts, (value,))
        case Palette():
            groups = 1 if form.group is None else weight.shape[0] // form.group
            parts = {
                "indices": (stored(weight.shape, f"uint{form.bits}"),),
                "lut": (stored((groups, *ones, 1 << form.bits, 1), "fp16"),),
            }
            yield Op("constexpr_lut_to_dense", value.name, parts, (value,))
    result = NamedValue(f"{name}_y", TensorType((1, weight.shape[0], 1, 1), "fp16"))
    yield Op("conv", f"{name}_y", {"x": (f"{name}_x",), "weight": (value.name,)}, (result,))


def stored(shape: tuple[int, ...], dtype: str) -> StoredConstant:
    """A constant with a type but no value."""

    def nothing() -> NoReturn:
        raise AssertionError("residency rules read no weights")

    return StoredConstant(TensorType(shape, dtype), nothing)
