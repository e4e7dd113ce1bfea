"""Ports of tiny random models that need no conversion: authored modules as twin and as shipped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint
from torch.overrides import _get_current_function_mode_stack

from cetane.bundle.rows import ROW_FORMATS, EncodedRows
from cetane.bundle.tables import Tables, TokenRows
from cetane.checkpoint import Tokenizer
from cetane.compress.encoded import Encoded
from cetane.compress.formats import Linear, Palette
from cetane.engine.authored import AuthoredBackend, AuthoredProgram, host_tables
from cetane.engine.backend import Arrays
from cetane.engine.engine import Engine
from cetane.engine.session import Session
from cetane.gates.authored import ModuleReadings, ShowingBackend
from cetane.gates.bounds import Tightened
from cetane.gates.golden import Proof
from cetane.gates.golden_result import GoldenResult
from cetane.gates.port import Stored
from cetane.gates.readings import judge_readings, misread
from cetane.gates.reference import Observed, Reference
from cetane.gates.resemblance import arrays
from cetane.gates.structure import ONE_LOGIT, judge_structure
from cetane.gates.verdict import Check
from cetane.gates.weights import judge_weights
from cetane.lower.template import shard_weights
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Recipe

QUESTIONS = ("weights", "structure", "compression")
Calls = Callable[[str, str, Arrays], None]
"""Changes the arrays that go into or come out of a function of a shard, in place."""


@contextmanager
def encoded_once() -> Iterator[None]:
    """A format's constants of the same values are computed once: most mutations change none."""
    made: dict[tuple[str, tuple[int, ...], bytes], Encoded] = {}
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Linear, Palette):
            encode = kind.encode

            def remembered(
                self: Any, weight: Any, counts: Any = None, encode: Any = encode
            ) -> Encoded:
                key = self.name, weight.shape, weight.tobytes()
                if counts is not None:
                    return encode(self, weight, counts)
                if key not in made:
                    made[key] = encode(self, weight)
                return made[key]

            patch.setattr(kind, "encode", remembered)
        yield


class TinyCheckpoint(InMemoryCheckpoint):
    """A checkpoint in memory, with the tokenizer that gates ask for."""

    fingerprint = "tiny"

    def __init__(self, model: Any, tokenizer: Tokenizer) -> None:
        super().__init__(model)
        self.tokenizer = tokenizer


class RememberedReference(Reference):
    """Answers again what it has been asked before: the truth is the same for every mutation."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__(checkpoint)
        self.answers: dict[str, list[Observed]] = {}

    def run(self, *asked: Any, choices: Any = (), **named: Any) -> list[Observed]:
        tightened = any(isinstance(mode, Tightened) for mode in _get_current_function_mode_stack())
        if choices or tightened:  # a port's own, or those of another model
            return super().run(*asked, choices=choices, **named)
        key = repr((asked, named))
        if key not in self.answers:
            self.answers[key] = super().run(*asked, **named)
        return self.answers[key]


@dataclass
class AuthoredPort(ModuleReadings):
    """A port made of authored modules; mutations change its parts before it is judged."""

    checkpoint: TinyCheckpoint
    recipe: Recipe
    before: list[Calls] = field(default_factory=list)
    after: list[Calls] = field(default_factory=list)
    sessions: list[Callable[[Session], None]] = field(default_factory=list)
    """Changes of what the host does with a new sequence."""
    opened_as: dict[str, str] = field(default_factory=dict)
    """Shards that are opened in the place of others."""
    stored: dict[str, dict[str, Encoded]] = field(default_factory=dict)
    """Constants of the package, by shard and label, that differ from what was encoded."""

    def __post_init__(self) -> None:
        self.planner = Planner(self.checkpoint, self.recipe)
        self.weights, self.tokenizer = self.checkpoint, self.checkpoint.tokenizer

    @cached_property
    def plan(self) -> Plan:
        return self.planner.plan()

    @cached_property
    def tables(self) -> Tables:
        """As the bundle has them: in the recipe's format."""
        own = host_tables(self.planner, self.checkpoint)
        row_format = ROW_FORMATS[self.plan.recipe.embedding.rows]

        def stored(rows: TokenRows) -> EncodedRows:
            return EncodedRows(row_format, row_format.encode(np.asarray(rows[:])), rows.shape)

        others = {name: stored(rows) for name, rows in own.others.items()}
        return Tables(stored(own.embedding), own.rotary, dict(others))

    def encode(self, shard: str) -> dict[str, Encoded]:
        """The constants of a shard as its package would have them."""
        used = shard_weights(self.planner, shard)
        made = {
            label: c.format.encode(c.weight.read(self.checkpoint).float().numpy())
            for label, c in used.items()
        }
        return made | self.stored.get(shard, {})

    @property
    def twin(self) -> Engine:
        backend = ShowingMutated(self, self.planner, self.checkpoint)
        tables = host_tables(self.planner, self.checkpoint)
        return MutatedEngine(self, backend, tables)

    @property
    def shipped(self) -> Engine:
        backend = ShippedBackend(self, self.planner, self.checkpoint)
        return MutatedEngine(self, backend, self.tables)

    resident = shipped
    int8_activations = False

    def computing(self, _: str, taken: Any = None) -> Engine:
        """Torch modules have no fp16 of their own."""
        return self.shipped

    def lost(self, *_: Any) -> None:
        """Torch modules have no ops to name."""

    def constants(self, shard: str) -> Iterator[Stored]:
        used = shard_weights(self.planner, shard)
        for label, encoded in self.encode(shard).items():
            yield Stored(shard, "decode", label, used[label], lambda e=encoded: arrays(e))


class MutatedEngine(Engine):
    """An engine behind the port's changes of sessions."""

    def __init__(self, port: AuthoredPort, backend: AuthoredBackend, tables: Tables) -> None:
        super().__init__(port.plan, backend, tables, resident=False)
        self.port = port

    def session(self, *options: Any, **named: Any) -> Session:
        session = super().session(*options, **named)
        for change in self.port.sessions:
            change(session)
        return session


class MutatedBackend(AuthoredBackend):
    """Authored modules on the checkpoint's values, behind the port's changes of calls."""

    def __init__(self, port: AuthoredPort, planner: Planner, weights: Any) -> None:
        super().__init__(planner, weights)
        self.port = port

    def open(self, shard: str) -> AuthoredProgram:
        return MutatedProgram(self.port, shard, super().open(self.port.opened_as.get(shard, shard)))


class ShowingMutated(MutatedBackend, ShowingBackend):
    """The same, which also shows the experts that tokens choose."""


class ShippedBackend(MutatedBackend):
    """The same on the decoded constants of the packages."""

    def open(self, shard: str) -> AuthoredProgram:
        program = super().open(shard)
        own = self.port.opened_as.get(shard, shard)
        used = shard_weights(self.planner, own)
        for label, encoded in self.port.encode(own).items():
            constant = used[label]
            values = torch.from_numpy(encoded.decode().astype(np.float32))
            constant.block.get_parameter(constant.path).data.copy_(values)
        return program


class MutatedProgram(AuthoredProgram):
    def __init__(self, port: AuthoredPort, shard: str, program: AuthoredProgram) -> None:
        super().__init__(program.modules)
        self.port, self.shard = port, shard

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        inputs = {name: np.array(array) for name, array in inputs.items()}
        for change in self.port.before:
            change(self.shard, function, inputs)
        names = [i.name for i in self.modules[function].inputs]
        outputs = super().call(function, {n: inputs[n] for n in names}, state)
        for change in self.port.after:
            change(self.shard, function, outputs)
        return outputs


@dataclass(frozen=True)
class Judged:
    """Which questions refuse a port, and the answer to the one about structure."""

    refused_by: tuple[str, ...]
    worst: float
    """The largest of structure's values, but for single logits: their limit is another one."""
    structure: Any
    result: GoldenResult | None


def judge(port: AuthoredPort, reference: Reference, structure: Any = None) -> Judged:
    """The golden gate of a port, but for the question that needs a package (fp16) and for greedy
    decoding. `structure` is that question's answer, where it is known: no twin depends on what a
    recipe compresses. What compression costs is asked only of a port that is right so far."""
    proof = Proof(port, port.checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
    answer = proof.structure() if structure is None else structure
    weights = proof.wrong_weights()
    checks = [
        *judge_weights(*weights),
        *judge_readings(list(misread(port, reference))),
        *judge_structure(answer[0]),
    ]
    values = {c.name: c.value for c in checks if c.name.startswith("structure: ")}
    worst = max(value for name, value in values.items() if ONE_LOGIT not in name)
    red = failed(checks)
    if red:
        return Judged(red, worst, answer, None)
    proof.structure = lambda: answer  # type: ignore[method-assign]
    proof.wrong_weights = lambda: weights  # type: ignore[method-assign]
    proof.rounding = lambda read: ([], [], 0.0, [])  # type: ignore[method-assign]
    result = proof.run(prompts=0, greedy_tokens=0)
    return Judged(failed(result.checks), worst, answer, result)


def failed(checks: Iterable[Check]) -> tuple[str, ...]:
    """The questions with a red check."""
    names = [check.name for check in checks if not check.passed]
    return tuple(q for q in QUESTIONS if any(name.startswith(q) for name in names))
