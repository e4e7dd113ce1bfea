"""Palettes of vectors, beside coremltools' own and a computation in plain numpy."""

from typing import Any

import numpy as np
import pytest
from coremltools.optimize._utils import lut_to_dense
from coremltools.optimize.coreml._quantization_passes import palettize_weights

from cetane.compress import parse_format
from cetane.compress.encoded import Palettized
from cetane.errors import CetaneError

WEIGHT = np.random.default_rng(3).standard_t(4, (32, 24, 1, 1)).astype(np.float16)
COUNTS = np.random.default_rng(4).lognormal(0, 1.5, (1, 24, 1, 1)).astype(np.float32)
NAMES = [
    "palette4-kmeans-vector2-per-tensor", "palette3-weighted-vector2-group16",
    "palette2-kmeans-vector2-group8", "palette2-weighted-vector4-per-tensor",
    "palette1-kmeans-vector4-group4",
]  # fmt: skip


def encoded(name: str, weight: Any = WEIGHT) -> Palettized:
    made = parse_format(name).encode(weight, COUNTS)
    assert isinstance(made, Palettized)
    return made


def by_hand(made: Palettized) -> np.ndarray:
    """Entry after entry, in plain loops."""
    groups, vector = len(made.lut), made.lut.shape[-1]
    rows, columns = made.indices.shape[:2]
    weight = np.zeros((rows * vector, columns), np.float16)
    for row in range(rows):
        for column in range(columns):
            table = made.lut[row // (rows // groups), 0, 0, 0]
            weight[row * vector : (row + 1) * vector, column] = table[
                made.indices[row, column, 0, 0]
            ]
    return weight[:, :, None, None]


@pytest.mark.parametrize("name", NAMES)
def test_weights_decode_as_by_hand_and_as_by_coremltools(name: str) -> None:
    made = encoded(name)
    np.testing.assert_array_equal(made.decode(), by_hand(made))
    np.testing.assert_array_equal(made.decode(), lut_to_dense(made.indices, made.lut, 0))


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_shapes_are_those_that_the_format_says(name: str) -> None:
    form, made = parse_format(name), encoded(name)
    assert form.nbytes(WEIGHT.shape) == made.packed().nbytes + made.lut.nbytes
    assert made.lut.shape == form.lut_shape(WEIGHT.shape)  # type: ignore[attr-defined]
    assert made.indices.max() < 2**made.bits


@pytest.mark.parametrize("name", NAMES)
def test_every_vector_has_its_nearest_entry(name: str) -> None:
    made = encoded(name)
    groups, vector = len(made.lut), made.lut.shape[-1]
    vectors = WEIGHT.reshape(groups, -1, vector, 24).transpose(0, 1, 3, 2).astype(np.float64)
    tables = made.lut.reshape(groups, 1, 1, -1, vector).astype(np.float64)
    distances = np.square(vectors[..., None, :] - tables).sum(-1)
    chosen = made.indices.reshape(groups, -1, 24, 1)
    found = np.take_along_axis(distances, chosen, 3)[..., 0]
    np.testing.assert_allclose(found, distances.min(-1), rtol=1e-4)


@pytest.mark.parametrize(("bits", "vector"), [(3, 2), (4, 2), (2, 4)])
def test_they_are_as_good_as_coremltools(bits: int, vector: int) -> None:
    weight = np.random.default_rng(5).standard_normal((64, 160)).astype(np.float16)
    params = palettize_weights.blockwise_compress(
        weight, "KMEANS", bits * vector, [0, 0], cluster_dim=vector, channel_axis=0
    )
    assert params.vector_axis == 0
    theirs = lut_to_dense(params.indices, params.lut, params.vector_axis)
    ours = encoded_of(f"palette{bits}-kmeans-vector{vector}-per-tensor", weight)
    assert params.lut.shape == ours.lut.shape
    errors = [
        float(np.square(w.astype(np.float64) - weight).sum()) for w in (ours.decode(), theirs)
    ]
    assert errors[0] < 1.03 * errors[1]


def encoded_of(name: str, weight: np.ndarray) -> Palettized:
    made = parse_format(name).encode(weight)
    assert isinstance(made, Palettized)
    return made


def test_vectors_err_less_than_single_weights_of_equal_bits() -> None:
    weight = np.random.default_rng(5).standard_normal((64, 640)).astype(np.float16)
    errors = [
        float(np.square(encoded_of(name, weight).decode().astype(np.float32) - weight).mean())
        for name in ("palette2-kmeans-per-tensor", "palette2-kmeans-vector2-per-tensor",
                     "palette2-kmeans-vector4-per-tensor")
    ]  # fmt: skip
    assert errors[0] > errors[1] > errors[2]


def test_costs_count() -> None:
    """What a weighted palette minimises is the error times the costs."""
    plain, weighted = (
        encoded(f"palette2-{mode}-vector2-per-tensor").decode().astype(np.float64)
        for mode in ("kmeans", "weighted")
    )
    costs = [float((np.square(made - WEIGHT) * COUNTS).sum()) for made in (weighted, plain)]
    assert costs[0] < 0.9 * costs[1]


def test_equal_weights_give_equal_constants() -> None:
    first, second = encoded(NAMES[0]), encoded(NAMES[0])
    assert first.lut.tobytes() == second.lut.tobytes()
    assert first.indices.tobytes() == second.indices.tobytes()


def test_fewer_vectors_than_entries_are_exact() -> None:
    weight = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float16)
    np.testing.assert_array_equal(
        encoded_of("palette4-kmeans-vector2-per-tensor", weight).decode(), weight
    )


def test_what_vectors_cannot_divide_is_refused() -> None:
    form = parse_format("palette2-kmeans-vector4-per-tensor")
    with pytest.raises(CetaneError, match="vectors of 4"):
        form.encode(np.zeros((6, 4), np.float16))
