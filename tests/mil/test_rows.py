"""A row's result is the same, bit for bit, for any number of rows, and any order of keys."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cetane.mil.ops import OPS
from cetane.mil.ops.linear import times_weight

rng = np.random.default_rng(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32))


SIZES = st.sampled_from([1, 3, 8, 9, 16, 37, 64, 101, 288, 640])


@pytest.mark.parametrize("threads", [1, 2])
@settings(max_examples=25)
@given(columns=SIZES, outputs=SIZES, rows=st.integers(1, 40), first=st.integers(0, 24))
@example(columns=37, outputs=3, rows=1, first=1)
def test_products_with_a_weight(
    threads: int, columns: int, outputs: int, rows: int, first: int
) -> None:
    x, weight = normal(64, columns), normal(outputs, columns)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        part, every = times_weight(x[first : first + rows], weight), times_weight(x, weight)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(part, every[first : first + rows], rtol=0, atol=0)
    truth = x.numpy().astype(np.float64) @ weight.numpy().T.astype(np.float64)
    np.testing.assert_allclose(every.numpy(), truth, rtol=1e-5, atol=1e-4)


COLUMNS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax over channels": lambda x: OPS["softmax"].call(x, axis=1),
    "layer_norm": lambda x: OPS["layer_norm"].call(x, axes=[1]),
    "reduce_sum": lambda x: OPS["reduce_sum"].call(x, axes=[1], keep_dims=True),
    "reduce_mean": lambda x: OPS["reduce_mean"].call(x, axes=[1], keep_dims=True),
    "reduce_l2_norm": lambda x: OPS["reduce_l2_norm"].call(x, axes=[1], keep_dims=True),
    "gelu": lambda x: OPS["gelu"].call(x, mode="TANH_APPROXIMATION"),
    "pointwise conv": lambda x: OPS["conv"].call(x, WEIGHT, BIAS),
} | {
    kind: OPS[kind].call
    for kind in ("exp", "tanh", "sigmoid", "silu", "softplus", "erf", "sin", "cos", "gelu")
}
WEIGHT, BIAS = normal(19, 37, 1, 1), normal(19)


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_of_a_hidden_tensor(name: str) -> None:
    """37 channels: tokens lie at every place of a vector of the processor."""
    x = normal(1, 37, 1, 64)
    every = COLUMNS[name](x)
    for tokens in (1, 3, 4, 8, 13):
        part = COLUMNS[name](x[..., 5 : 5 + tokens].contiguous())
        assert torch.equal(part, every[..., 5 : 5 + tokens]), tokens


@pytest.mark.parametrize("keys", [5, 100, 513])
def test_attention_in_any_order_of_keys(keys: int) -> None:
    q, k, v = normal(1, 2, 12, 64), normal(1, 2, 64, keys), normal(1, 2, 64, keys)
    matmul, softmax = OPS["matmul"].call, OPS["softmax"].call

    def attend(rows: torch.Tensor, order: np.ndarray) -> torch.Tensor:
        k_, v_ = k[..., order], v[..., order]
        hidden = torch.zeros(1, 1, 1, len(order) + 3)
        hidden[..., -3:] = -4e4
        k_, v_ = (torch.cat([x, x[..., :3]], -1) for x in (k_, v_))
        return matmul(softmax(matmul(rows, k_) + hidden, axis=-1), v_, transpose_y=True)

    every = attend(q, np.arange(keys))
    assert torch.equal(attend(q[:, :, 7:8], rng.permutation(keys)), every[:, :, 7:8])
