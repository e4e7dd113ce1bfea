"""Threads that share a tape, when Ctrl-C comes at the worst moment."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, normal

from cetane.mil import load
from cetane.mil.executor import Executable
from cetane.mil.fast import FastProgram
from cetane.mil.fast.tape import function as tapes
from cetane.mil.fast.tape.model import TapeModel

THREADS = 3


@pytest.fixture(scope="module")
def package(build: Build) -> Path:
    weight = normal(64, 64, 1, 1).astype(np.float16)

    def body(x: Any) -> Any:
        first = mb.relu(x=mb.conv(x=x, weight=weight, pad_type="valid"))
        return mb.conv(x=first, weight=weight, pad_type="valid")

    return build({"x": ((1, 64, 1, 64), "fp16")}, body)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share every tape."""
    monkeypatch.setattr(tapes, "_sharing", True)
    monkeypatch.setattr(tapes, "SMALLEST", 0)
    monkeypatch.setattr(tapes, "available", lambda: THREADS)


class Interrupting:
    """A pool in which Ctrl-C comes before or after the hand-over number `at`."""

    def __init__(self, pool: ThreadPoolExecutor, at: int, before: bool) -> None:
        self.pool, self.at, self.before, self.calls = pool, at, before, 0

    def submit(self, *call: Any) -> Any:
        self.calls += 1
        if self.before and self.calls == self.at:
            raise KeyboardInterrupt
        future = self.pool.submit(*call)
        if not self.before and self.calls == self.at:
            raise KeyboardInterrupt
        return future


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("at", range(1, THREADS))
def test_ctrl_c_at_a_hand_over(
    at: int, before: bool, package: Path, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call ends, and so does the next one, with the right result."""
    program = FastProgram(load(package), pack=True)
    assert isinstance(program.shared("main"), TapeModel)
    function, inputs = program.function("main"), {"x": normal(1, 64, 1, 64)}
    truth = Executable(program.program.functions["main"], "fp32")(inputs)
    pool: Callable[[int], ThreadPoolExecutor] = tapes._pool
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tapes, "_pool", lambda threads: Interrupting(pool(threads), at, before))
        function(inputs)
    for name, values in function(inputs).items():
        np.testing.assert_allclose(values, truth[name], rtol=1e-4, atol=1e-4)


def test_ctrl_c_behind_the_work(
    package: Path, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This thread's share is done, and must not be begun again: nobody would come."""
    program = FastProgram(load(package), pack=True)
    function, inputs = program.function("main"), {"x": normal(1, 64, 1, 64)}
    right = function(inputs)
    perform = tapes.partial

    def interrupted(*given: Any) -> Any:
        work = perform(*given)

        def run(thread: int, threads: int) -> int:
            made: int = work(thread, threads)
            if thread == 0:
                raise KeyboardInterrupt
            return made

        return run

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tapes, "partial", interrupted)
        function(inputs)
    for name, values in function(inputs).items():
        np.testing.assert_array_equal(values, right[name])
