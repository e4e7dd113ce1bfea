"""How many of torch's threads a function takes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb

from cetane.errors import CetaneError
from cetane.mil import Executable, load
from cetane.mil.executor import SHARED, compile


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
        return compile(load(path).functions["main"])

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
