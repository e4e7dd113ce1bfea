"""Models made and run by coremltools with the bridge in place."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cetane import bridge
from cetane.hardware.quiet import import_coremltools

ct = import_coremltools()


@pytest.fixture
def bridged() -> Iterator[None]:
    """The bridge, for one test."""
    assert bridge.install()
    yield
    bridge.uninstall()


class Accumulate(torch.nn.Module):
    """Adds a projection of its input to a state, which it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(self.linear(x))
        return self.total * 1


def convert(model: torch.nn.Module, example: Any, **options: Any) -> Any:
    options.setdefault("inputs", [ct.TensorType("x", shape=example.shape)])
    options.setdefault("outputs", [ct.TensorType("y")])
    options.setdefault("minimum_deployment_target", ct.target.iOS18)
    options.setdefault("compute_precision", ct.precision.FLOAT32)
    traced = torch.jit.trace(model.eval(), example, check_trace=False)
    return ct.convert(traced, **options)


def accumulate() -> tuple[Accumulate, Any]:
    model = Accumulate()
    total = ct.StateType(ct.TensorType(shape=(1, 3), dtype=np.float16), name="total")
    return model, convert(model, torch.zeros(1, 4), states=[total])
