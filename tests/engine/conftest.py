"""Engines on authored modules of a tiny llama."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.conftest import InMemoryCheckpoint, build_model

from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.plan import Planner
from cetane.recipe import parse_recipe

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
