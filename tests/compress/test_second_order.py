"""Second-order rounding against plain rounding, and against every change of a single index."""

import numpy as np
import pytest

from cetane.compress import parse_format, second_order
from cetane.compress.encoded import Affine, Encoded, Palettized
from cetane.compress.rounding_problem import VectorRoundingProblem
from cetane.compress.selection import SecondOrder
from cetane.errors import CetaneError


def inputs(columns: int, rows: int = 400, seed: int = 0) -> np.ndarray:
    """Correlated, some channels much larger than others."""
    rng = np.random.default_rng(seed)
    mixed = rng.normal(size=(rows, columns)) @ (
        np.eye(columns) + rng.normal(size=(columns, columns)) / columns**0.5
    )
    return (mixed * np.exp(rng.normal(size=columns))).astype(np.float32)


def hessian(x: np.ndarray) -> np.ndarray:
    return x.T @ x / len(x)


def output_error(weight: np.ndarray, decoded: np.ndarray, x: np.ndarray) -> float:
    """Of the layer's output itself, in float64."""
    off = (weight.astype(np.float64) - decoded.astype(np.float64)) @ x.T.astype(np.float64)
    return float(np.square(off).mean())


@pytest.mark.parametrize("name", ["palette4-kmeans-group8", "palette2-kmeans-group8",
                                  "palette3-kmeans-per-tensor", "int4-per-channel",
                                  "palette2-kmeans-vector2-per-tensor",
                                  "palette1-kmeans-vector4-group8"])  # fmt: skip
def test_outputs_err_less_than_with_plain_rounding(name: str) -> None:
    form, x = parse_format(name), inputs(48)
    weight = np.random.default_rng(1).normal(0, 0.05, (16, 48)).astype(np.float32)
    made = second_order.encode(weight, form, hessian(x))
    assert output_error(weight, made.decode(), x) < 0.8 * output_error(
        weight, form.encode(weight).decode(), x
    )


@pytest.mark.parametrize("name", ["palette4-kmeans-group8", "palette2-kmeans-group8",
                                  "int4-per-channel", "palette2-kmeans-vector2-per-tensor",
                                  "palette1-kmeans-vector4-group8"])  # fmt: skip
def test_errors_go_to_outputs_that_count_less(name: str) -> None:
    """The loss is a quadratic form of a layer's output, given by the gradients of 400 samples."""
    form, x, gradients = parse_format(name), inputs(48), inputs(16, seed=7)
    weight = np.random.default_rng(1).normal(0, 0.05, (16, 48)).astype(np.float32)

    def loss(made: Encoded) -> float:
        off = weight.astype(np.float64) - made.decode()
        return float(np.einsum("oi,ij,pj,op->", off, hessian(x), off, hessian(gradients)))

    alike = loss(second_order.encode(weight, form, hessian(x)))
    assert loss(second_order.encode(weight, form, hessian(x), hessian(gradients))) < 0.9 * alike
    same = second_order.encode(weight, form, hessian(x), np.eye(16, dtype=np.float32))
    assert loss(same) == pytest.approx(alike, rel=0.02)  # outputs that count alike


def test_no_single_index_can_be_improved() -> None:
    """Every index, changed alone, makes the output worse: tried one by one."""
    x = inputs(6)
    weight = np.random.default_rng(2).normal(0, 0.1, (8, 6)).astype(np.float32)
    damped = second_order.damped(hessian(x), SecondOrder().damping)
    form = parse_format("palette1-kmeans-group8")
    made = second_order.encode(weight, form, hessian(x))
    assert isinstance(made, Palettized)
    levels = made.lut.reshape(-1).astype(np.float64)

    def cost(values: np.ndarray) -> float:
        off = weight.astype(np.float64) - values
        return float(((off @ damped) * off).sum())

    own = cost(levels[made.indices])
    for row, column in np.ndindex(made.indices.shape):
        other = made.indices.copy()
        other[row, column] ^= 1
        assert cost(levels[other]) >= own * (1 - 0.02)


def test_no_vector_can_be_improved() -> None:
    """Every index of a palette of pairs, by any other, where errors of the outputs count together.
    One improvement moves the next ones, so the descent leaves little behind, not nothing."""
    x, gradients = inputs(6), inputs(8, seed=7)
    weight = np.random.default_rng(2).normal(0, 0.1, (8, 6)).astype(np.float32)
    form = parse_format("palette1-kmeans-vector2-per-tensor")
    made = second_order.encode(weight, form, hessian(x), hessian(gradients))
    assert isinstance(made, Palettized) and made.lut.shape == (1, 1, 4, 2)
    columns = second_order.damped(hessian(x), SecondOrder().damping)
    rows = second_order.damped(hessian(gradients), second_order.OUTPUT_DAMPING)

    def cost(indices: np.ndarray) -> float:
        off = weight.astype(np.float64) - Palettized(indices, made.lut, 2).decode()
        return float(np.vdot(rows @ off, off @ columns))

    own = cost(made.indices)
    for row, column in np.ndindex(made.indices.shape):
        for index in range(4):
            other = made.indices.copy()
            other[row, column] = index
            assert cost(other) >= own * (1 - 0.02)


def test_weights_that_are_on_a_palette_stay_there() -> None:
    rng = np.random.default_rng(3)
    palette = np.sort(rng.normal(0, 0.1, (2, 16)).astype(np.float16), axis=1)
    weight = np.stack([palette[row // 8][rng.integers(0, 16, 40)] for row in range(16)])
    made = second_order.encode(
        weight.astype(np.float32), parse_format("palette4-kmeans-group8"), hessian(inputs(40))
    )
    np.testing.assert_allclose(made.decode(), weight, atol=1e-3)


def test_a_vector_is_chosen_for_all_its_rows_together() -> None:
    """One input, two outputs whose errors count only as a difference: the pair with the right
    difference is taken, not the nearest one."""
    weight = np.array([[1.0], [0.0]], np.float32)
    outputs = np.array([[1.0, -0.999], [-0.999, 1.0]], np.float32)
    problem = VectorRoundingProblem(weight, np.eye(1, dtype=np.float32), outputs, True, 2)
    palette = np.array([[[0.6, 1.6], [0.1, 0.6]]], np.float32)  # pairs (0.6, 0.1) and (1.6, 0.6)
    assert problem.round(palette).tolist() == [[1]]
    indices = np.array([[0]], np.uint8)
    problem.descend(palette, indices)
    assert indices.tolist() == [[1]]


def test_constants_have_the_form_of_their_format() -> None:
    weight = np.random.default_rng(4).normal(size=(16, 12, 1, 1)).astype(np.float32)
    palette = second_order.encode(
        weight, parse_format("palette4-kmeans-group8"), np.eye(12, dtype=np.float32)
    )
    assert isinstance(palette, Palettized)
    assert palette.indices.shape == weight.shape and palette.lut.shape == (2, 1, 1, 1, 16, 1)
    assert (np.diff(palette.lut.reshape(2, 16).astype(np.float32), axis=1) >= 0).all()
    pairs = second_order.encode(
        weight, parse_format("palette2-kmeans-vector2-group8"), np.eye(12, dtype=np.float32)
    )
    assert isinstance(pairs, Palettized) and pairs.bits == 4
    assert pairs.indices.shape == (8, 12, 1, 1) and pairs.lut.shape == (2, 1, 1, 1, 16, 2)
    linear = second_order.encode(
        weight, parse_format("int4-per-channel"), np.eye(12, dtype=np.float32)
    )
    assert isinstance(linear, Affine)
    assert linear.data.shape == weight.shape and linear.scale.shape == (16, 1, 1, 1)
    assert np.abs(linear.data).max() <= 7


@pytest.mark.parametrize("name", ["int4-per-channel", "palette4-kmeans-group8",
                                  "palette3-kmeans-vector2-per-tensor"])  # fmt: skip
def test_no_level_is_beyond_fp16(name: str) -> None:
    """What fits the inputs best may be larger than the largest weight."""
    for seed in range(12):
        weight = np.random.default_rng(seed).normal(size=(16, 16)).astype(np.float32)
        weight *= 65504 / np.abs(weight).max()
        made = second_order.encode(weight, parse_format(name), hessian(inputs(16, seed=seed)))
        assert np.isfinite(made.decode()).all()


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    x = inputs(12)
    x[:, 3] = 0
    weight = np.random.default_rng(5).normal(size=(8, 12)).astype(np.float32)
    form = parse_format("palette4-kmeans-group8")
    assert np.isfinite(second_order.encode(weight, form, hessian(x)).decode()).all()
    zeros = np.zeros((12, 12), np.float32)
    assert np.isfinite(second_order.encode(weight, form, zeros).decode()).all()


def test_what_does_not_fit_is_refused() -> None:
    weight = np.zeros((8, 12), np.float32)
    with pytest.raises(CetaneError, match="int8-per-channel has no second order"):
        second_order.encode(weight, parse_format("int8-per-channel"), np.eye(12, dtype=np.float32))
    with pytest.raises(CetaneError, match=r"Hessian of shape \(11, 11\) does not fit"):
        second_order.encode(weight, parse_format("int4-per-channel"), np.eye(11, dtype=np.float32))
    with pytest.raises(CetaneError, match="groups of 16"):
        second_order.encode(
            weight, parse_format("palette4-kmeans-group16"), np.eye(12, dtype=np.float32)
        )


def test_options_change_the_rounding() -> None:
    """Much damping leaves the rounding of every column alone; the order decides who makes up."""
    form, x = parse_format("palette3-kmeans-per-tensor"), inputs(32)
    weight = np.random.default_rng(3).normal(size=(8, 32)).astype(np.float32)
    errors = {}
    for options in (SecondOrder(), SecondOrder(damping=1), SecondOrder(order="given")):
        made = second_order.encode(weight, form, hessian(x), None, options)
        errors[options.damping, options.order] = output_error(weight, made.decode(), x)
    assert len(set(errors.values())) == 3
    assert errors[0.01, "largest"] < errors[1, "largest"]
