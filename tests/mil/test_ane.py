"""The "ane" arithmetic's products, against numpy's float16 by the rules of `cetane.mil.ane`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coremltools.converters.mil import Builder as mb
from hypothesis import given, settings
from hypothesis import strategies as st

from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.ane import GROUP, SHORT, matmul
from cetane.mil.executor import Executable

LEAST = 2.0**-14


def by_hand(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`rows (M, K)` times `columns (K, N)`, with numpy's own float16."""
    total = np.zeros((len(rows), columns.shape[1]), np.float32)
    for start in range(0, len(columns), GROUP):
        group = np.zeros_like(total, np.float16)
        for term in range(start, min(start + GROUP, len(columns))):
            product = np.multiply.outer(rows[:, term], columns[term]).astype(np.float16)
            product[np.abs(product) < LEAST] = 0
            group = (group + product).astype(np.float16)
        total += group.astype(np.float32)
    return total


@settings(deadline=None, max_examples=15)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(SHORT, SHORT + 20),
    st.integers(1, 9), st.sampled_from([1e-4, 1e-2, 1.0, 8.0]),
)  # fmt: skip
def test_products_follow_the_rules(
    seed: int, rows: int, terms: int, width: int, spread: float
) -> None:
    random = np.random.default_rng(seed)
    left = (spread * random.standard_normal((rows, terms))).astype(np.float16)
    left[random.random(left.shape) < 0.3] = 0
    right = random.standard_normal((terms, width)).astype(np.float16)
    made = matmul(*(torch.from_numpy(x).float() for x in (left, right)))
    np.testing.assert_array_equal(made.numpy(), by_hand(left, right))


def test_small_products_count_as_zero() -> None:
    weights, values = torch.full((1, 512), 1 / 512).half().float(), torch.full((512, 1), 0.01)
    assert float(matmul(weights, values.half().float())) == 0
    assert float(matmul(64 * weights, values.half().float())) / 64 == pytest.approx(0.01, rel=1e-3)


def test_batches_and_transposed_factors() -> None:
    x, y = torch.randn(1, 4, 3, 300).half().float(), torch.randn(1, 1, 5, 300).half().float()
    made = matmul(x, y, transpose_y=True)
    assert made.shape == (1, 4, 3, 5)
    for head in range(4):
        expected = by_hand(x[0, head].half().numpy(), y[0, 0].T.half().numpy())
        np.testing.assert_array_equal(made[0, head].numpy(), expected)


def test_short_sums_are_those_of_fp16() -> None:
    x, y = torch.randn(2, 8), torch.randn(8, 3)
    truth = (x.double() @ y.double()).float()
    torch.testing.assert_close(matmul(x, y), truth, atol=0, rtol=0)


def test_the_executor_uses_them_in_ane_precision(build: Callable[..., Path]) -> None:
    inputs = {"weights": ((1, 512), "fp16"), "values": ((512, 1), "fp16")}
    package = build(inputs, lambda weights, values: mb.matmul(x=weights, y=values))
    function = load(package).functions["main"]
    arrays: dict[str, Any] = {
        "weights": np.full((1, 512), 1 / 512, np.float16),
        "values": np.full((512, 1), 0.01, np.float16),
    }
    results = {
        precision: float(next(iter(Executable(function, precision)(arrays).values()))[0, 0])
        for precision in ("fp32", "fp16", "ane")
    }
    assert results["ane"] == 0
    assert results["fp16"] == pytest.approx(results["fp32"], rel=1e-3)
    with pytest.raises(CetaneError, match="it is one of"):
        Executable(function, "bf16")  # type: ignore[arg-type]
