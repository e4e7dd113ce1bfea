"""The twin: the finished packages, run with the checkpoint's own values, in fp32.

- The checkpoint's parameters replace the constants that were made from them, compressed or not.
- A program rounds the authored modules' numbers to fp16, such as an epsilon or the factor on
  attention scores. The twin uses the exact numbers.
- Where a program rounds keys and values for caches of 8 bits, the twin does not. Its host keeps
  floating-point numbers in place of bytes. Nor does the twin round activations to 8 bits.

So a twin of a right port differs from the model only by the order of sums. It also shows which
experts it chooses, and the logits among which a head chooses.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from cetane.engine.backend import Array
from cetane.engine.portable import CompiledProgram, ReferenceProgram, ShardPaths, in_fp32
from cetane.errors import CetaneError
from cetane.families import Weights
from cetane.gates.experts import showing
from cetane.gates.heads import showing_logits
from cetane.lower.structure import records
from cetane.lower.template import shard_weights
from cetane.lower.tracing import SMALLEST_FP16, LabelledWeight
from cetane.mil import MilFunction, Op, load
from cetane.mil.constants import Constants
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Argument, Program, StoredConstant, TensorType
from cetane.mil.substitute import Substitute, substitute
from cetane.planner import Planner
from cetane.schema.function import Function
from cetane.schema.plan import Plan


class TwinBackend:
    """A backend that runs packages with the checkpoint's own values, in fp32."""

    name, by_rows = "twin", False
    dtype: type[np.floating] = np.float32

    def __init__(
        self,
        packages: ShardPaths,
        planner: Planner,
        weights: Weights,
        change: Callable[[MilFunction], MilFunction],
    ) -> None:
        """`change` makes each function anew, before it runs."""
        self.packages, self.planner, self.weights = packages, planner, weights
        self.change = change

    def open(self, shard: str) -> ReferenceProgram | CompiledProgram:
        return in_fp32(self.load(shard))

    def load(self, shard: str) -> Program:
        """The program of a shard, with the checkpoint's own values."""
        used = result_names(shard_weights(self.planner, shard))
        parameters = {
            name: Substitute(f"{shard}/{name}", TwinParameter(constant, self.weights))
            for name, constant in used.items()
        }
        own = records(self.planner, shard)
        numbers = Unrounded(
            chain.from_iterable(record.scalars for record in own.values()),
            {name: record.epsilons for name, record in own.items()},
        )
        program = substitute(
            load(self.packages.shard(shard)),
            lambda function: parameters | numbers.substitutes(function),
        )
        functions = {name: showing(one, used) for name, one in program.functions.items()}
        if self.planner.recipe.head.choose:
            functions = {name: showing_logits(one, used) for name, one in functions.items()}
        functions = {name: self.change(unquantized(one)) for name, one in functions.items()}
        return replace(program, functions=functions)


def unquantized(function: MilFunction) -> MilFunction:
    """The function without the rounding of keys, values and activations to 8 bits, and with fp16 in
    place of int8."""
    index = FunctionIndex(function)
    rounding, exact = roundings(index), unrounded_activations(index)

    def numbers(type_: TensorType) -> TensorType:
        return replace(type_, dtype="fp16") if type_.dtype == "int8" else type_

    ops = []
    for op in function.ops:
        if op in rounding:
            op = replace(op, kind="identity")
        elif op.outputs and op.outputs[0].name in exact:
            op = replace(op, kind="identity", inputs={"x": exact[op.outputs[0].name]})
        elif op.kind == "slice_by_index":
            outputs = [replace(v, type=v.type and numbers(v.type)) for v in op.outputs]
            op = replace(op, outputs=tuple(outputs))
        ops.append(op)
    return replace(
        function,
        inputs={name: numbers(type_) for name, type_ in function.inputs.items()},
        body=replace(function.body, ops=tuple(ops)),
    )


def roundings(index: FunctionIndex) -> list[Op]:
    """The ops that round keys and values for caches of 8 bits: each makes a part of an output for
    such a cache.

    An op is none of them if another op reads what it rounds too. The tokens of a call would then
    see other keys than later calls do."""
    found: list[Op] = []
    inputs = index.function.inputs.items()
    values = [f"{name}_out" for name, type_ in inputs if type_.dtype == "int8"]
    while values:
        op = index.producer(values.pop())
        if op is not None and op.kind == "concat":
            values += op.references()
        elif op is not None and op.kind == "round":
            alone = [index.readers[operand] for operand in op.references()] == [[op]]
            found += [op] if alone and op not in found else []
    return found


def unrounded_activations(index: FunctionIndex) -> dict[str, tuple[Argument, ...]]:
    """By the name of each activation that a function rounds to 8 bits, what it rounds.

    A pair of `quantize` and `dequantize` only rounds if both have the same numbers. Otherwise it
    changes an activation, and the twin keeps it."""
    literals, rounded = Constants(index), {}

    def numbers(op: Op) -> dict[str, Any]:
        given = {name: op.inputs.get(name) for name in ("scale", "zero_point", "axis")}
        return {name: one and literals.plain(one[0]) for name, one in given.items()}

    for op in index.function.ops:
        if op.kind == "dequantize":
            maker = index.producer(op.inputs["input"][0], "quantize")
            if maker is not None and numbers(maker) == numbers(op):
                rounded[op.outputs[0].name] = maker.inputs["input"]
    return rounded


def keeping_numbers(plan: Plan) -> Plan:
    """A plan whose host keeps fp16 numbers where the plan's host keeps int8: that of a twin, and of
    a port whose rounding is judged."""

    def numbers(function: Function) -> Function:
        inputs = [
            item.model_copy(update={"dtype": "fp16"}) if item.dtype == "int8" else item
            for item in function.inputs
        ]
        return function.model_copy(update={"inputs": tuple(inputs)})

    if plan.recipe.cache.format == "fp16":
        return plan
    shards = [
        shard.model_copy(update={"functions": tuple(map(numbers, shard.functions))})
        for shard in plan.shards
    ]
    made = plan.model_copy(update={"shards": tuple(shards)})
    for name in ("functions", "by_name"):  # cached properties of the old shards
        vars(made).pop(name, None)
    return made


class TwinParameter:
    """Reads a parameter of the checkpoint in fp32, in the shape that the graph uses."""

    def __init__(self, constant: LabelledWeight, weights: Weights) -> None:
        self.constant, self.weights = constant, weights

    def __call__(self) -> Array:
        values: Array = self.constant.weight.read(self.weights).float().numpy()
        return values


class Unrounded:
    """The exact numbers behind the fp16 numbers of a program."""

    def __init__(
        self, numbers: Iterable[float], epsilons: Mapping[str, Sequence[float]] | None = None
    ) -> None:
        """`epsilons` are those of each function's norms, in order."""
        self.known: dict[float, set[float]] = defaultdict(set)
        for number in numbers:
            self.known[rounded(number)].add(number)
        self.epsilons = epsilons or {}

    def substitutes(self, function: MilFunction) -> dict[str, Substitute]:
        """By result name, the exact number of every scalar for which it is clear: the norm's own
        epsilon, or the only number that rounds to it."""
        places = self.by_place(function)
        exact: dict[str, Substitute] = {}
        for op in function.ops:
            value = op.inputs["val"][0] if op.kind == "const" else None
            if isinstance(value, StoredConstant) and is_half(value):
                name, half = op.outputs[0].name, float(value.numpy())
                own = places.get(name)
                known = self.known.get(half, set())
                before = {own} if own is not None and rounded(own) == half else known
                if len(before) == 1:
                    number = Number(*before)
                    exact[name] = Substitute(f"number {number.value!r}", number)
        return exact

    def by_place(self, function: MilFunction) -> dict[str, float]:
        """The epsilons of a function's norms, by result name. Their order tells them apart where
        fp16 does not, as below `SMALLEST_FP16`.

        Empty if lowering made one norm of two equal ones: their order then tells nothing."""
        norms = [op for op in function.ops if op.kind == "layer_norm"]
        own = self.epsilons.get(function.name, ())
        if len(norms) != len(own):
            return {}
        names = [op.inputs.get("epsilon", ("",))[0] for op in norms]
        return {
            name: number for name, number in zip(names, own, strict=True) if isinstance(name, str)
        }


def is_half(value: StoredConstant) -> bool:
    """Whether a constant is one fp16 number."""
    return value.type.dtype == "fp16" and value.type.shape == ()


def rounded(number: float) -> float:
    """A number as lowering rounds it: to fp16, and a positive one to at least `SMALLEST_FP16`."""
    if 0 < number < SMALLEST_FP16:
        return SMALLEST_FP16
    with np.errstate(over="ignore"):
        return float(np.float16(number))


class Number:
    """Gives a number as an fp32 array `()`."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self) -> Array:
        return np.array(self.value, np.float32)


def result_names(used: dict[str, LabelledWeight]) -> dict[str, LabelledWeight]:
    """The parameters of a shard, by the names that lowering gives their values."""
    names = {label.replace(".", "_"): constant for label, constant in used.items()}
    if len(names) != len(used):
        raise CetaneError(
            "two parameters of a shard get one name in its programs: "
            "their labels differ only in dots and underscores"
        )
    return names
