"""A port in its forms for the gates: as it ships, in narrower arithmetic, and as its twin.

The twin has the checkpoint's own values, so its errors are errors of the graph. The difference
between the shipped port and the twin is the loss by compression.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.bundle.tables import Tables
from cetane.checkpoint import Tokenizer
from cetane.engine.authored import host_tables
from cetane.engine.backend import Array, Arrays
from cetane.engine.engine import Engine
from cetane.engine.portable import (
    CompiledProgram,
    PortableBackend,
    ReferenceProgram,
    ShardPaths,
)
from cetane.engine.session import Session
from cetane.families import SOFTPLUS_MOST, Weights
from cetane.gates.experts import TakenExperts, routed_blocks, showing
from cetane.gates.heads import Chooser, choices, chooser, head_choices
from cetane.gates.lost import LostNumbers, first_lost, seeking
from cetane.gates.observe import ProbeTask, observe
from cetane.gates.readings import Activation, Readable
from cetane.gates.twin import TwinBackend, keeping_numbers, result_names, roundings, unquantized
from cetane.lower.template import shard_weights
from cetane.lower.tracing import LabelledWeight, labelled_weights
from cetane.mil import MilFunction, Op, load
from cetane.mil.constants import Constants
from cetane.mil.index import FunctionIndex
from cetane.mil.ops import OPS
from cetane.mil.program import Precision, Program, StoredConstant, TensorType
from cetane.planner import Planner, Programs
from cetane.schema.plan import Plan

ACTIVATIONS = ("gelu", "relu", "silu")
"""The kinds of ops into which lowering turns the families' activations."""
BOUNDING = ("clip", "minimum", "maximum")
"""The kinds of ops that bound a tensor by numbers."""


class Port(Readable, Protocol):
    """The forms and constants of a port that the gates use."""

    @property
    def plan(self) -> Plan: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def shipped(self) -> Engine:
        """The port as it ships, in fp32; one shard in memory at a time."""

    @property
    def twin(self) -> Engine:
        """The twin: the checkpoint's own values, in fp32."""

    @property
    def resident(self) -> Engine:
        """The port as a user runs it, in fp32, with all shards in memory."""

    @property
    def int8_activations(self) -> bool:
        """Whether its programs round activations to 8 bits."""

    def scales(self, shard: str) -> dict[str, dict[str, Any]]:
        """By function, the scales of the activations that it rounds to 8 bits, by their names."""

    def computing(self, arithmetic: Precision, taken: TakenExperts | None = None) -> Engine:
        """The port in an arithmetic, by `ArithmeticBackend`."""

    def lost(
        self, arithmetic: Precision | None, task: ProbeTask, after: Session | None = None
    ) -> LostNumbers | None:
        """Where the port first gives infinity or NaN on a task: in an arithmetic, or as its twin.
        With `after`, the task goes on from that session. None if nothing tells."""

    def constants(self, shard: str) -> Iterator["Stored"]:
        """The constants of a shard that hold parameters. Shared ones come once."""


class Stored:
    """A constant of a program, and the parameter that it stands for, by its name.

    `constant` is None if no parameter has the name. `value` reads the constant's arrays; it is None
    for a parameter that the function does not read.
    """

    def __init__(
        self,
        shard: str,
        function: str,
        label: str,
        constant: LabelledWeight | None,
        value: Any = None,
    ) -> None:
        self.shard, self.function, self.label = shard, function, label
        self.constant, self.value = constant, value

    @property
    def parts(self) -> dict[str, Array]:
        """Its arrays, by the input names of its MIL op; a plain constant has only `weight`."""
        parts: dict[str, Array] = self.value()
        return parts


class Packaged:
    """A port whose shards are packages: a bundle, or the first shards of one."""

    def __init__(
        self,
        packages: ShardPaths,
        planner: Planner,
        weights: Weights,
        tables: Tables,
        tokenizer: Tokenizer,
        plan: Plan | None = None,
    ) -> None:
        """`plan` is the one that ships; without it, the planner's."""
        self.packages, self.planner, self.weights = packages, planner, weights
        self.tables, self.tokenizer, self._shipped_plan = tables, tokenizer, plan

    @cached_property
    def plan(self) -> Plan:
        return self._shipped_plan or self.planner.plan()

    @property
    def shipped(self) -> Engine:
        return Engine(self.plan, PortableBackend(self.packages), self.tables, resident=False)

    @property
    def twin(self) -> Engine:
        return self.tightened({})

    def tightened(self, others: Mapping[float, float]) -> Engine:
        backend = TwinBackend(self.packages, self.planner, self.weights, partial(tight, others))
        tables = host_tables(self.planner, self.weights)
        return Engine(keeping_numbers(self.plan), backend, tables, resident=False)

    @property
    def resident(self) -> Engine:
        return Engine(self.plan, PortableBackend(self.packages), self.tables)

    @cached_property
    def int8_activations(self) -> bool:
        return any(load(self.packages.shard(name)).int8_activations for name in self.plan.by_name)

    def functions(self, shard: str) -> Iterator[tuple[str, FunctionIndex, Constants]]:
        """The functions of a shard's package, by name."""
        return indexed_functions(self.packages, shard)

    def scales(self, shard: str) -> dict[str, dict[str, Any]]:
        return {
            name: {
                str(op.inputs["input"][0]): literals.plain(op.inputs["scale"][0])
                for op in index.function.ops
                if op.kind == "quantize"
            }
            for name, index, literals in self.functions(shard)
        }

    def computing(self, arithmetic: Precision, taken: TakenExperts | None = None) -> Engine:
        backend = ArithmeticBackend(self.packages, self.planner, arithmetic, taken)
        return Engine(keeping_numbers(self.plan), backend, self.tables, resident=False)

    def lost(
        self, arithmetic: Precision | None, task: ProbeTask, after: Session | None = None
    ) -> LostNumbers | None:
        engine = self.twin if arithmetic is None else self.computing(arithmetic)
        if after is not None:  # its plan may be that of one capacity
            engine = Engine(after.plan, engine.backend, engine.tables, resident=False)
        sought = seeking(engine, arithmetic or "fp32")
        return first_lost(lambda: observe(sought, self.planner, [task], after))

    def epsilons(self, shard: str) -> dict[str, float]:
        return {
            f"{name}/{op.name}": float(literals.plain(op.inputs["epsilon"][0]))
            for name, index, literals in self.functions(shard)
            for op in index.function.ops
            if op.kind == "layer_norm" and "epsilon" in op.inputs
        }

    def activations(self, shard: str) -> dict[str, Activation]:
        return {
            f"{name}/{op.name}": ActivationOp(op, literals)
            for name, index, literals in self.functions(shard)
            for op in index.function.ops
            if op.kind in ACTIVATIONS
        }

    def bounds(self, shard: str) -> dict[str, list[float]]:
        return {name: list(bounds_in(index)) for name, index, _ in self.functions(shard)}

    def roundings(self, shard: str) -> dict[str, int]:
        return {name: len(roundings(index)) for name, index, _ in self.functions(shard)}

    def choosers(self, shard: str) -> dict[str, Chooser | None]:
        planned = {f.name: f for f in self.plan.by_name[shard].functions if head_choices(f)}
        found = dict[str, Chooser | None]()
        for name, index, _ in self.functions(shard) if planned else ():
            if name in planned:
                used = result_names(used_in(self.planner, shard, name))
                for rows, value in choices(index.function, used):
                    made = chooser(index.function, planned[name], rows, value)
                    found[f"{name}, rows from {rows[0]}"] = made
        return found

    def constants(self, shard: str) -> Iterator[Stored]:
        return stored_constants(self.packages, self.planner, shard)


class ArithmeticBackend(PortableBackend):
    """Runs packages in an arithmetic that is compared with another one.

    Two things would make much of a small difference, so it does without:

    - A code of 8 bits is a whole step off where rounding moves it at all. So such caches and
      activations are unrounded, as the twin's are.
    - Near a tie of experts, either choice is right. So programs show what they chose, and may take
      the experts of another run, and those that were far.
    """

    def __init__(
        self,
        packages: ShardPaths,
        planner: Planner,
        arithmetic: Precision,
        taken: TakenExperts | None = None,
    ) -> None:
        """A narrower arithmetic follows the experts `taken` in fp32, by the same calls."""
        super().__init__(packages, arithmetic)
        self.planner, self.taken = planner, taken

    def open_in(self, shard: str, precision: Precision) -> ReferenceProgram | CompiledProgram:
        if self.taken is None or not self.taken.blocks:
            return super().open_in(shard, precision)
        return FollowingProgram(self.load(shard), precision, self.taken.by_name(shard))

    def load(self, shard: str) -> Program:
        program = super().load(shard)
        functions = dict(program.functions)
        if routed_blocks(self.planner.model.layers):
            used = result_names(shard_weights(self.planner, shard))
            follows = self.taken is not None
            functions = {name: showing(one, used, follows) for name, one in functions.items()}
        functions = {name: unquantized(one) for name, one in functions.items()}
        return replace(program, functions=functions)


class FollowingProgram(ReferenceProgram):
    """A program in which other numbers take the place of some values."""

    def __init__(
        self, program: Program, precision: Precision, others: Mapping[str, Callable[..., Any]]
    ) -> None:
        """`others` give these numbers, by the value's name: in the shape of the value."""
        super().__init__(program, precision)
        self.others = others

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        return self.function(function)(inputs, state, self.exchanged)

    def exchanged(self, name: str, value: Any) -> Any:
        return self.others[name](value) if name in self.others else None


def computes_as_shipped(port: Port) -> bool:
    """Whether `ArithmeticBackend` runs a port's programs as they are."""
    rounds = port.planner.recipe.cache.format == "int8" or port.int8_activations
    return not rounds and not routed_blocks(port.planner.model.layers)


class ActivationOp:
    """An op of `ACTIVATIONS`, computed by the reference executor in fp32."""

    def __init__(self, op: Op, literals: Constants) -> None:
        self.op, self.literals = op, literals

    def __call__(self, x: Array) -> Array:
        mode = self.op.inputs.get("mode")
        options = {"mode": self.literals.plain(mode[0])} if mode else {}
        result: Array = OPS[self.op.kind].call(torch.from_numpy(x), **options).numpy()
        return result


def bounds_in(index: FunctionIndex) -> Iterator[float]:
    """The numbers by which a function holds activations, op by op."""
    literals = Constants(index)
    for op in index.ops:
        softcap = op.kind == "mul" and any(index.producer(x, "tanh") for x in op.references())
        if softcap or decides(op, index) or holds(op, index, literals):
            yield from numbers_of(op, literals).values()


def decides(op: Op, index: FunctionIndex) -> bool:
    """Whether an op makes the bound above which a tensor is larger, as that of far experts."""
    made = tuple(value.name for value in op.outputs)
    readers = index.readers.get(made[0], ()) if op.kind == "mul" else ()
    return any(one.kind == "greater" and one.inputs["y"] == made for one in readers)


def holds(op: Op, index: FunctionIndex, literals: Constants) -> bool:
    """Whether an op is one of `BOUNDING`, and its numbers may change a result.

    Two of cetane's own change none. Its softplus adds again what is above the bound, and its choice
    among equal numbers only asks whether a count is 0."""
    if op.kind not in BOUNDING:
        return False
    numbers = {*numbers_of(op, literals).values()}
    readers = {one.kind: one for one in index.readers.get(op.outputs[0].name, ())}
    minus = readers.get("sub")
    if minus is None or minus.inputs["y"] != (op.outputs[0].name,):
        return True
    if readers.keys() == {"sub", "softplus"}:
        return minus.inputs["x"] != op.inputs["x"] or numbers != {SOFTPLUS_MOST}
    counts = index.producer(op.inputs["x"][0], "matmul") is not None and numbers == {0, 1}
    return not counts or 1 not in numbers_of(minus, literals).values()


def numbers_of(op: Op, literals: Constants) -> dict[str, float]:
    """The floating-point numbers that an op gets, by the names of its inputs."""
    numbers = {}
    for name, (given,) in op.inputs.items():
        if given in literals and literals.type(given).dtype in ("fp16", "fp32"):
            number = literals.array(given)
            if number.size == 1:
                numbers[name] = number.item()
    return numbers


def tight(others: Mapping[float, float], function: MilFunction) -> MilFunction:
    """The function with other bounds in the ops of `BOUNDING`, by the bounds that they replace."""
    if not others:
        return function
    index = FunctionIndex(function)
    literals = Constants(index)

    def changed(op: Op) -> Op:
        numbers = numbers_of(op, literals) if holds(op, index, literals) else {}
        inputs = {
            name: (other_number(literals.type(op.inputs[name][0]), others[half]),)
            for name, number in numbers.items()
            if (half := float(np.float16(number))) in others
        }
        return replace(op, inputs=op.inputs | inputs)

    ops = tuple(map(changed, function.ops))
    return replace(function, body=replace(function.body, ops=ops))


def other_number(type_: TensorType, number: float) -> StoredConstant:
    """A literal of a type that holds one number, in fp32."""
    return StoredConstant(type_, partial(np.full, type_.shape, number, np.float32))


def indexed_functions(
    packages: ShardPaths, shard: str
) -> Iterator[tuple[str, FunctionIndex, Constants]]:
    """The functions of a shard's package, by name."""
    for name, function in load(packages.shard(shard)).functions.items():
        index = FunctionIndex(function)
        yield name, index, Constants(index)


def stored_constants(packages: ShardPaths, planner: Programs, shard: str) -> Iterator[Stored]:
    """The constants of a shard's package that hold parameters. Shared ones come once."""
    graphs = {graph.function.name: graph for graph in planner.graphs(shard)}
    seen: set[Any] = set()
    for name, index, _ in indexed_functions(packages, shard):
        wanted = {}
        if name in graphs:
            wanted = result_names(used_in(planner, shard, name))
        yield from stored_in(shard, index.function, wanted, seen)


def used_in(planner: Programs, shard: str, function: str) -> dict[str, LabelledWeight]:
    """The parameters that a function of a shard uses, by label."""
    graph = next(g for g in planner.graphs(shard) if g.function.name == function)
    return {item.label: item for item in labelled_weights(planner, shard, graph)}


def stored_in(
    shard: str, function: MilFunction, wanted: dict[str, LabelledWeight], seen: set[Any]
) -> Iterator[Stored]:
    """The constants of a function by the names of their results, and those of `wanted` that are
    missing, or that no op reads.

    Constants whose keys another function added to `seen` are left out."""
    index = FunctionIndex(function)
    literals = Constants(index)
    there = {}
    for op in function.ops:
        encoded = op.kind.startswith("constexpr_")
        if len(op.outputs) == 1 and (encoded or (op.kind == "const" and op.name in wanted)):
            there[op.outputs[0].name] = op
    for name, constant in wanted.items():
        if name not in there or not index.readers.get(name):
            yield Stored(shard, function.name, constant.label, constant)
    for name, op in there.items():
        key = name, literals.key(name)
        if key in seen:
            continue
        seen.add(key)
        label = wanted[name].label if name in wanted else name
        yield Stored(shard, function.name, label, wanted.get(name), ConstantArrays(op, literals))


class ConstantArrays:
    """Reads the arrays of a constant."""

    def __init__(self, op: Op, literals: Constants) -> None:
        self.op, self.literals = op, literals

    def __call__(self) -> dict[str, Array]:
        if self.op.kind == "const":
            return {"weight": self.literals.array(self.op.outputs[0].name)}
        return {name: self.literals.array(given[0]) for name, given in self.op.inputs.items()}


def packaged(bundle: Bundle, planner: Planner, weights: Weights) -> Packaged:
    """A finished bundle as a port, with the manifest's plan: hosts run that plan."""
    plan = bundle.plan.on(planner.adapter)
    return Packaged(bundle, planner, weights, bundle.tables(), bundle.tokenizer, plan)
