"""A twin computes with the numbers that fp16 rounded, wherever it is clear which they were."""

import numpy as np
import pytest

from cetane.gates.twin import SMALLEST, Unrounded, rounded
from cetane.mil.program import Body, MilFunction, NamedValue, Op, StoredConstant, TensorType


def function(**scalars: float) -> MilFunction:
    """Constants of fp16, by name."""
    half = TensorType((), "fp16")
    ops = tuple(
        Op("const", name, {"val": (StoredConstant(half, lambda v=value: np.float16(v)),)},
           (NamedValue(name, half),))
        for name, value in scalars.items()
    )  # fmt: skip
    return MilFunction("main", {}, {}, {}, Body((), ops, ()))


@pytest.mark.parametrize("number", [1e-6, 24**-0.5, 1e-12, 0.5, -1 / 3])
def test_a_rounded_number_is_the_number_again(number: float) -> None:
    held = max(np.float16(number), np.float16(SMALLEST)) if number > 0 else np.float16(number)
    exact = Unrounded([number, 7.0]).substitutes(function(scale=float(held)))
    assert exact["scale"].read() == np.float32(number)


def test_another_number_stays() -> None:
    """As one that a wrong graph has, or one that two numbers may have been."""
    numbers = Unrounded([0.25, 1e-12, 3e-12])
    assert numbers.substitutes(function(wrong=0.26, unclear=SMALLEST)) == {}


def test_nothing_but_zero_is_below_the_smallest() -> None:
    assert rounded(1e-30) == SMALLEST == float(np.nextafter(np.float16(0), np.float16(1)))
    assert rounded(0.0) == 0
    assert rounded(1e6) == np.inf
