"""Engines on authored modules of a tiny llama, and of a tiny ZAYA."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.gemma_models import build_gemma4
from tests.families.parity import engine_of
from tests.families.recipes import recipe as zaya_recipe
from tests.families.zaya_models import build_zaya

from cetane.engine.authored import authored_engine
from cetane.engine.backend import Arrays, Backend, OpenShard
from cetane.engine.engine import Engine
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

CONTEXT = 32


@pytest.fixture(scope="session")
def model() -> Any:
    return build_model("llama")


@pytest.fixture(scope="session")
def checkpoint(model: Any) -> InMemoryCheckpoint:
    return InMemoryCheckpoint(model)


@pytest.fixture(scope="session")
def tiny_engine(checkpoint: InMemoryCheckpoint) -> Callable[..., Engine]:
    """`tiny_engine(contract, **recipe)`: an engine with a context of 32 and widths 1, 4 and 8."""

    def make(contract: str = "readonly", **content: Any) -> Engine:
        defaults = {
            "name": "test",
            "cache": {"contract": contract, "context": CONTEXT},
            "tokens": {"verify": 4, "prefill": 8},
            "head": {"slices": 2},
        }
        return authored_engine(
            Planner(checkpoint, parse_recipe(defaults | content, "test")), checkpoint
        )

    return make


@pytest.fixture(scope="session")
def gemma() -> Any:
    """A Gemma 4 whose sliding layers see 12 tokens."""
    return build_gemma4(sliding_window=12)


class Counting:
    """A backend that runs another's programs and writes down what is opened and called."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name, self.dtype = backend, backend.name, backend.dtype
        self.by_rows = backend.by_rows
        self.opened: list[str] = []
        self.calls: list[tuple[str, str, Arrays, Arrays]] = []
        """Shard, function, inputs and outputs."""
        self.live: weakref.WeakSet[Any] = weakref.WeakSet()
        self.most_live = 0

    def open(self, shard: str) -> OpenShard:
        self.opened.append(shard)
        program = CountingProgram(self, shard, self.backend.open(shard))
        self.live.add(program)
        self.most_live = max(self.most_live, len(self.live))
        return program

    def functions(self) -> list[str]:
        """Names of the functions that were called, in order."""
        return [function for _, function, _, _ in self.calls]


class CountingProgram:
    def __init__(self, counting: Counting, shard: str, program: OpenShard) -> None:
        self.counting, self.shard, self.program = counting, shard, program

    def make_state(self, function: str) -> Any:
        return self.program.make_state(function)

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        outputs = self.program.call(function, inputs, state)
        copies = {name: value.copy() for name, value in inputs.items()}
        self.counting.calls.append((self.shard, function, copies, outputs))
        return outputs


@pytest.fixture(scope="session")
def zaya() -> Any:
    """A random ZAYA whose tokens go to all four experts, and to none."""
    return build_zaya()


@pytest.fixture(scope="session")
def zaya_engine(zaya: Any) -> Callable[..., Engine]:
    """`zaya_engine(contract, resident=..., ...)`: an engine that counts, widths 1, 4 and 8; takes
    what `tests.families.recipes.recipe` takes."""

    def make(contract: str = "readonly", resident: bool = True, **content: Any) -> Engine:
        made = engine_of(zaya, zaya_recipe(contract, **content))
        backend = Counting(made.backend)
        return Engine(made.plan, backend, made.tables, resident=resident)

    return make
