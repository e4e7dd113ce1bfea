"""How many of torch's threads a function takes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb

from cetane.errors import CetaneError
from cetane.mil import Executable, MilFunction, load
from cetane.mil.bind import Decoded
from cetane.mil.executor import SHARED


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compiled(build: Callable[..., Path]) -> Callable[[int], Executable]:
    def make(rows: int) -> Executable:
        path = build(
            {"x": ((rows, 1), "fp32"), "n": ((1,), "int32")},
            lambda x, n: mb.gather(x=mb.add(x=x, y=np.ones((1, 1024), np.float32)), indices=n),
        )
        return Executable(load(path).functions["main"])

    return make


@pytest.mark.parametrize(("rows", "count"), [(SHARED // 1024, 2), (SHARED // 1024 - 1, 1)])
def test_small_results_are_not_shared(
    compiled: Callable[[int], Executable], two_threads: None, rows: int, count: int
) -> None:
    """Whatever happens, those of the caller are as they were."""
    function, seen = compiled(rows), []
    inputs = {"x": np.ones((rows, 1), np.float32), "n": np.array([0], np.int32)}
    function(inputs, watch=lambda name, value: seen.append(torch.get_num_threads()) or value)
    assert set(seen) == {count}
    assert torch.get_num_threads() == 2
    with pytest.raises(CetaneError):
        function(inputs | {"n": np.array([rows], np.int32)})
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_functions_of_a_program_share_a_weight(build: Callable[..., Path], precision: Any) -> None:
    """The other weight, of the same shape and name, is its own."""
    indices = np.arange(12, dtype=np.int8).reshape(3, 4)

    def product(scale: float) -> MilFunction:
        def body(x: Any) -> Any:
            weight = mb.constexpr_blockwise_shift_scale(
                data=indices, scale=np.full((1, 1), scale, np.float16), name="weight"
            )
            return mb.linear(x=x, weight=weight)

        return load(build({"x": ((1, 4), "fp16")}, body)).functions["main"]

    one, other = product(0.1), product(0.2)
    decoded: Decoded = {}
    functions = [Executable(function, precision, decoded) for function in (one, one, other)]
    assert len(decoded) == 2
    x = {"x": np.ones((1, 4), np.float16)}
    for function, alone in zip(functions, (one, one, other), strict=True):
        (made,), (truth,) = function(x).values(), Executable(alone, precision)(x).values()
        np.testing.assert_array_equal(made, truth)
