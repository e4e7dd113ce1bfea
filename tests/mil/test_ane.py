"""The "ane" arithmetic's products, against numpy's float16 by the rules of `cetane.mil.ane`."""

from collections.abc import Callable
from functools import partial
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


@settings(max_examples=15)
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


SIZES = {"q": (1, 2, 5, 64), "k": (1, 2, 2048, 64), "v": (1, 2, 2048, 16), "m": (1, 1, 5, 2048)}


def written_out(q: Any, k: Any, v: Any, m: Any, boolean: bool = False) -> Any:
    """Attention as coremltools writes it for iOS 17."""
    if boolean:
        nothing, all_ = (np.full(SIZES["m"], number, np.float16) for number in (-np.inf, 0))
        m = mb.select(cond=mb.greater(x=m, y=np.float16(0)), a=all_, b=nothing)
    scores = mb.matmul(x=mb.mul(x=q, y=np.float16(1 / 8)), y=k, transpose_y=True)
    return mb.matmul(x=mb.softmax(x=mb.add(x=scores, y=m), axis=-1), y=v)


def one_op(q: Any, k: Any, v: Any, m: Any, boolean: bool = False) -> Any:
    mask = mb.greater(x=m, y=np.float16(0)) if boolean else m
    return mb.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=mask)


def by_equations(q: Any, k: Any, v: Any, m: Any) -> Any:
    def product(x: Any, y: Any) -> Any:
        turned = [mb.transpose(x=one, perm=[0, 2, 1, 3]) for one in (x, y)]
        made = mb.einsum(values=turned, equation="nchw,nwhu->nchu")
        return mb.transpose(x=made, perm=[0, 2, 1, 3])

    keys = mb.transpose(x=k, perm=[0, 1, 3, 2])
    scores = product(mb.mul(x=q, y=np.float16(1 / 8)), keys)
    return product(mb.softmax(x=mb.add(x=scores, y=m), axis=-1), v)


@pytest.mark.parametrize(
    ("body", "options"), [(one_op, {}), (one_op, {"boolean": True}), (by_equations, {})]
)
def test_attention_in_other_ops(
    build: Callable[..., Path], body: Any, options: dict[str, bool]
) -> None:
    """It has the products of the same attention written with `matmul`, and so its errors."""
    random = np.random.default_rng(0)
    arrays = {n: random.standard_normal(s).astype(np.float16) for n, s in SIZES.items()}
    inputs = {name: (shape, "fp16") for name, shape in SIZES.items()}

    def run(body: Any, precision: Any) -> np.ndarray:
        function = load(build(inputs, partial(body, **options))).functions["main"]
        (result,) = Executable(function, precision)(arrays).values()
        return np.asarray(result, np.float64)

    made, truth, exact = run(body, "ane"), run(written_out, "ane"), run(written_out, "fp32")
    np.testing.assert_array_equal(made, truth)
    assert np.linalg.norm(made - exact) > 0.005 * np.linalg.norm(exact)


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
