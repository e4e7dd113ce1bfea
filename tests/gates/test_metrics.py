"""The figures, beside torch and by hand."""

import numpy as np
import pytest
import torch

from cetane.gates.metrics import contains_top, cosine, divergence, largest, log_softmax, psnr

A = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32) * 9
B = np.random.default_rng(1).normal(size=(6, 40)).astype(np.float32) * 9


def test_cosine() -> None:
    np.testing.assert_allclose(cosine(np.array([[3, 4], [1, 0], [1, 1]]),
                                      np.array([[4, 3], [0, 2], [-2, -2]])),
                               [24 / 25, 0, -1])  # fmt: skip
    expected = torch.cosine_similarity(torch.tensor(A).double(), torch.tensor(B).double())
    np.testing.assert_allclose(cosine(A, B), expected, rtol=1e-12)


def test_cosine_of_what_fp16_cannot_square() -> None:
    large = np.full((1, 8), 60000, np.float16)
    np.testing.assert_allclose(cosine(large, large), 1)


def test_cosine_with_zero() -> None:
    zero = np.zeros((1, 4))
    assert cosine(zero, np.ones((1, 4))) == cosine(zero, zero) == 0


def test_largest() -> None:
    """Root mean squares of 5 and 1; differences of 1 and 0.5."""
    truth = np.array([[7.0, 1, 5, 5], [1, -1, 1, -1]])
    wrong = np.array([[7.0, 1, 4, 5.5], [1, -1, 1.5, -1]])
    np.testing.assert_allclose(largest(wrong, truth), [0.2, 0.5])
    assert largest(truth, truth).tolist() == [0, 0]
    assert largest(np.full((1, 4), np.nan), truth[:1]) == np.inf


def test_psnr() -> None:
    """Peak 10, mean square noise 1/4: 10 log10(400)."""
    reference = np.array([[10.0, 0, 0, -1], [10, 0, 0, -1], [-20, 0, 0, 0]])
    found = reference + np.array([[0.5, -0.5, 0.5, 0.5], [0, 0, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_allclose(psnr(found, reference), [26.0206, np.inf, 26.0206], atol=1e-4)


def test_psnr_of_zero() -> None:
    assert psnr(np.ones((1, 3)), np.zeros((1, 3))) == -np.inf


@pytest.mark.parametrize("scale", [1, 100, 1e4])
def test_divergence(scale: float) -> None:
    a, b = torch.tensor(A * scale).double(), torch.tensor(B * scale).double()
    expected = torch.nn.functional.kl_div(
        a.log_softmax(-1), b.log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    np.testing.assert_allclose(divergence(A * scale, B * scale), expected, rtol=1e-6)
    np.testing.assert_allclose(divergence(A, A), 0, atol=1e-12)
    assert not np.allclose(divergence(A, B), divergence(B, A))


def test_divergence_of_heads_that_lack_tokens() -> None:
    a, b = A.copy(), B.copy()
    a[:, :3] = b[:, :3] = -np.inf
    np.testing.assert_allclose(divergence(a, b), divergence(A[:, 3:], B[:, 3:]), rtol=1e-12)
    b[:, 3] = 0
    a[:, 3] = -np.inf  # the other has it
    assert np.isinf(divergence(a, b)).all()
    a[0] = np.nan
    assert np.isnan(divergence(a, b)[0])


def test_log_softmax() -> None:
    expected = torch.tensor(A).double().log_softmax(-1)
    np.testing.assert_allclose(log_softmax(A), expected, atol=1e-6)
    assert np.isfinite(log_softmax(np.array([[1e4, -1e4]]))).all()


def test_contains_top() -> None:
    reference = np.array([[0, 9, 1, 2.0]] * 4)
    logits = np.array([[0, 5, 1, 2], [6, 5, 1, 2], [6, 5, 7, 2], [6, 5, 7, 8.0]])
    for k in (1, 2, 3, 4):
        assert contains_top(logits, reference, k).tolist() == [k >= 1, k >= 2, k >= 3, k >= 4]
    constant = np.zeros((4, 4))
    assert not contains_top(constant, reference, 1).any()
    assert contains_top(constant, reference, 2).all()
    expected = (torch.tensor(A).topk(5).indices == torch.tensor(B).argmax(1, keepdim=True)).any(1)
    assert contains_top(A, B, 5).tolist() == expected.tolist()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_never_good(value: float) -> None:
    """An overflow in fp16 must not look like agreement."""
    reference = np.array([[3.0, 1, 2]])
    found = np.array([[value, 1, 2]])
    assert cosine(found, reference) == 0
    assert psnr(found, reference) == -np.inf
    with np.errstate(invalid="ignore"):
        assert not divergence(found, reference) <= 1e9
    assert not contains_top(np.full((1, 3), np.nan), reference, 2)
