"""Example calls: every function of a bundle once, with the outputs that cetane's executor expects.

A kit calls each function alone with these inputs, to measure its time and to compare its outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cetane.bundle import Bundle
from cetane.engine.backend import Array, Arrays, Backend, OpenShard
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.engine.schedule import Wanted
from cetane.gates.probes import text_tokens
from cetane.gates.reference import RESIDENT
from cetane.schema.interface import FromCache, FromHistory, FromMatrix
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

LARGEST_OUTPUT = 1 << 20
"""Elements of the largest output of a function that is kept for comparison."""


@dataclass
class ExampleCall:
    """The first call of a function. Caches, histories and matrices are empty in it."""

    inputs: Arrays
    """All inputs that are not empty."""
    outputs: Arrays
    zeros: dict[str, tuple[int, ...]]
    """The shapes of the empty inputs, by name."""


class ExampleRecorder:
    """A backend that keeps the first call of every function. Inputs are rounded to fp16 first, as
    Core ML gets them."""

    name, dtype, by_rows = "recorder", np.float32, False

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self.backend, self.plan = backend, plan
        self.calls: dict[tuple[str, str], ExampleCall] = {}

    def open(self, shard: str) -> OpenShard:
        return RecordedShard(self, shard, self.backend.open(shard))


class RecordedShard:
    """A shard whose calls the recorder sees."""

    def __init__(self, recorder: ExampleRecorder, name: str, shard: OpenShard) -> None:
        self.recorder, self.name, self.shard = recorder, name, shard

    def make_state(self, function: str) -> object:
        return self.shard.make_state(function)

    def call(self, function: str, inputs: Arrays, state: object) -> Arrays:
        halves = {name: half(value) for name, value in inputs.items()}
        outputs = self.shard.call(function, {n: wide(v) for n, v in halves.items()}, state)
        if (self.name, function) not in self.recorder.calls:
            described = self.recorder.plan.functions[self.name, function]
            empty = {
                item.name: item.shape
                for item in described.inputs
                if isinstance(item.source, FromCache | FromHistory | FromMatrix)
            }
            self.recorder.calls[self.name, function] = ExampleCall(
                {name: value for name, value in halves.items() if name not in empty},
                {n: half(v) for n, v in outputs.items() if v.size <= LARGEST_OUTPUT},
                empty,
            )
        return outputs


def half(value: Array) -> Array:
    """An array as Core ML gets it: int8, fp16 or int32."""
    if value.dtype == np.int8:
        return value
    return value.astype(np.float16) if value.dtype.kind == "f" else value.astype(np.int32)


def wide(value: Array) -> Array:
    return value.astype(np.float32) if value.dtype.kind == "f" else value


def function_calls(bundle: Bundle) -> dict[tuple[str, str], ExampleCall]:
    """The first call of every function, at the start of a sequence, where all caches are empty: in
    every mode, with every adapter and without.

    No call reaches some functions, such as an expert that no token chose. Such a function gets the
    inputs of another one whose inputs have the same names and shapes, and no expected outputs.
    Without such a twin, it is left out.
    """
    plan = bundle.plan
    recorder = ExampleRecorder(PortableBackend(bundle, "fp32"), plan)
    resident = plan.weight_bytes <= RESIDENT
    for capacity in plan.capacities:
        engine = Engine(plan.at(capacity.tokens), recorder, bundle.tables(), resident=resident)
        for adapter in (None, *capacity.adapters):
            for mode, described in capacity.modes.items():
                tokens = text_tokens(bundle.tokenizer, described.tokens)
                for wanted in ("all", "none"):
                    feed(engine, mode, tokens, wanted, adapter)
    by_shapes = {input_shapes(plan, key): call for key, call in recorder.calls.items()}
    for key in plan.functions:
        twin = by_shapes.get(input_shapes(plan, key))
        if key not in recorder.calls and twin is not None:
            recorder.calls[key] = ExampleCall(twin.inputs, {}, twin.zeros)
    return recorder.calls


def feed(
    engine: Engine, mode: Mode, tokens: Sequence[int], wanted: Wanted, adapter: str | None
) -> None:
    """One call of a mode, on a new sequence."""
    session = engine.session([mode], adapter=adapter)
    engine.run([(session, session.prepare(tokens, wanted))], last=True)


def input_shapes(plan: Plan, key: tuple[str, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The names and shapes of a function's inputs."""
    return tuple((item.name, item.shape) for item in plan.functions[key].inputs)
