"""k-means palettes against exact k-means: kmeans1d, and every partition of a few values."""

from itertools import combinations

import numpy as np
import pytest
from coremltools._deps.kmeans1d import cluster
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cetane.compress.palettes import kmeans, uniform

BITS = [1, 2, 3, 4, 6, 8]


def groups(largest: float) -> st.SearchStrategy[np.ndarray]:
    values = st.floats(-largest, largest, width=16)
    return hnp.arrays(np.float16, st.integers(1, 60), elements=values)


def squared_error(group: np.ndarray, lut: np.ndarray, indices: np.ndarray) -> float:
    return float(((lut.astype(np.float64)[indices] - group.astype(np.float64)) ** 2).sum())


def exact_error(group: np.ndarray, bits: int) -> float:
    values, counts = np.unique(group.astype(np.float64), return_counts=True)
    result = cluster(values.tolist(), 2**bits, weights=counts.tolist())
    centroids = np.array(result.centroids)[result.clusters]
    return float((counts * (values - centroids) ** 2).sum())


def draw(kind: str, size: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = {
        "normal": lambda: rng.normal(0, 0.03, size),
        "uniform": lambda: rng.uniform(-1, 1, size),
        "student": lambda: 0.03 * rng.standard_t(2, size),
        "log-normal": lambda: rng.lognormal(-3, 2, size) * rng.choice([-1, 1], size),
        "one outlier": lambda: np.append(rng.normal(0, 0.02, size - 1), 60000),
        "grid": lambda: rng.integers(-40, 40, size) / 64,
    }[kind]()
    return values.astype(np.float16)


@pytest.mark.parametrize("bits", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "kind", ["normal", "uniform", "student", "log-normal", "one outlier", "grid"]
)
def test_error_is_within_a_percent_of_exact(kind: str, bits: int) -> None:
    group = draw(kind)
    assert squared_error(group, *kmeans(group, bits)) <= 1.01 * exact_error(group, bits)


@given(hnp.arrays(np.float16, st.integers(3, 8), elements=st.integers(-20, 20)))
def test_a_few_values_are_split_in_the_best_place(group: np.ndarray) -> None:
    values = np.sort(group.astype(np.float64))
    best = min(
        sum(float(((part - part.mean()) ** 2).sum()) for part in np.split(values, cuts))
        for count in (1, 2, 3)
        for cuts in combinations(range(1, len(values)), count)
        if count < len(values)
    )
    # Centroids are rounded to fp16: by at most 2**-7 for values up to 20.
    assert squared_error(group, *kmeans(group, 2)) <= best + len(values) * 2.0**-14


@pytest.mark.parametrize("bits", BITS)
@given(group=groups(65504))
def test_a_kmeans_palette_is_ascending(group: np.ndarray, bits: int) -> None:
    lut, indices = kmeans(group, bits)
    assert lut.shape == (2**bits,)
    assert lut.dtype == np.float16
    assert indices.shape == group.shape
    assert indices.dtype == np.uint8
    assert (lut[1:] >= lut[:-1]).all()


@pytest.mark.parametrize("bits", BITS)
@given(group=groups(30000))
def test_kmeans_is_never_worse_than_uniform(group: np.ndarray, bits: int) -> None:
    lut, indices = uniform(group[None], bits)
    other = squared_error(group, lut[0], indices[0])
    assert squared_error(group, *kmeans(group, bits)) <= other * (1 + 1e-9)


@pytest.mark.parametrize("bits", BITS)
def test_evenly_spaced_values_are_no_worse_than_uniform(bits: int) -> None:
    group = np.repeat(np.linspace(-1, 1, 2**bits + 1), 3).astype(np.float16)
    lut, indices = uniform(group[None], bits)
    assert squared_error(group, *kmeans(group, bits)) <= squared_error(group, lut[0], indices[0])


@given(hnp.arrays(np.float16, st.integers(1, 60), elements=st.sampled_from([-2, -0.0, 0, 0.5, 7])))
def test_few_distinct_values_are_exact_and_the_last_is_repeated(group: np.ndarray) -> None:
    lut, indices = kmeans(group, 2)
    np.testing.assert_array_equal(lut[indices], group)
    distinct = np.unique(group)
    np.testing.assert_array_equal(lut[: len(distinct)], distinct)
    assert (lut[len(distinct) :] == distinct[-1]).all()


def test_the_same_weights_give_the_same_palette() -> None:
    group = draw("student")
    first, again = kmeans(group, 4), kmeans(group[::-1].copy(), 4)
    np.testing.assert_array_equal(first[0], again[0])
    np.testing.assert_array_equal(first[1], again[1][::-1])


def test_a_constant_group_has_a_constant_uniform_palette() -> None:
    lut, indices = uniform(np.full((1, 8), 0.25, dtype=np.float16), 4)
    assert (lut == 0.25).all()
    assert (indices == 0).all()
