"""k-means palettes against exact k-means: kmeans1d, and every partition of a few values."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from coremltools._deps.kmeans1d import cluster
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cetane.compress import palettes
from cetane.compress.palettes import uniform

BITS = [1, 2, 3, 4, 6, 8]


def kmeans(group: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    lut, indices = palettes.kmeans(group[None], bits)
    return lut[0], indices[0]


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


def bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)


def draw(kind: str, size: int = 4000) -> np.ndarray:
    rng = np.random.default_rng(0)
    values = {
        "normal": lambda: rng.normal(0, 0.03, size),
        "uniform": lambda: rng.uniform(-1, 1, size),
        "student": lambda: 0.03 * rng.standard_t(2, size),
        "log-normal": lambda: rng.lognormal(-3, 2, size) * rng.choice([-1, 1], size),
        "one outlier": lambda: np.append(rng.normal(0, 0.02, size - 1), 60000),
        "grid": lambda: rng.integers(-40, 40, size) / 64,
        "laplace": lambda: rng.laplace(0, 0.02, size),
        "bf16": lambda: bf16(rng.normal(0, 0.02, size)),
    }[kind]()
    return values.astype(np.float16)


@pytest.mark.parametrize("bits", [1, 2, 4, 6])
@pytest.mark.parametrize(
    "kind", ["normal", "uniform", "student", "log-normal", "one outlier", "grid"]
)
def test_error_is_within_a_percent_of_exact(kind: str, bits: int) -> None:
    group = draw(kind)
    assert squared_error(group, *kmeans(group, bits)) <= 1.01 * exact_error(group, bits)


@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "uniform", "bf16", "one outlier"])
def test_a_whole_group_is_no_worse_than_coremltools(kind: str) -> None:
    group = draw(kind, 32 * 2048)
    values, inverse, counts = np.unique(group, return_inverse=True, return_counts=True)
    theirs = cluster(values, 16, weights=counts)
    lut = np.array(theirs.centroids).astype(np.float16)
    error = squared_error(group, lut, np.array(theirs.clusters)[inverse])
    assert squared_error(group, *kmeans(group, 4)) <= error * (1 + 1e-12)


def test_eight_bits_are_within_a_percent_of_exact() -> None:
    group = draw("normal", 10_000)
    assert squared_error(group, *kmeans(group, 8)) <= 1.01 * exact_error(group, 8)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@given(
    group=hnp.arrays(np.float16, st.integers(1, 10), elements=st.floats(-8, 8, width=16)),
    repeats=st.integers(1, 3),
)
def test_a_dynamic_programme_by_hand_agrees(group: np.ndarray, repeats: int, bits: int) -> None:
    group = np.repeat(group, repeats)
    values = np.sort(group.astype(np.float64))
    least = np.array([0.0] + [np.inf] * len(values))  # of the first values, in the clusters so far
    for _ in range(min(2**bits, len(values))):
        least = np.array(
            [0.0]
            + [
                min(least[start] + values[start:end].var() * (end - start) for start in range(end))
                for end in range(1, len(values) + 1)
            ]
        )
    # Centroids are rounded to fp16: by at most 2**-9 for values up to 8.
    bound = least[-1] + len(values) * 2.0**-18 + 1e-9
    assert squared_error(group, *kmeans(group, bits)) <= bound


@pytest.mark.parametrize("bits", [1, 2])
@given(data=st.data())
def test_weighted_is_the_best_of_all_partitions(data: st.DataObject, bits: int) -> None:
    count = data.draw(st.integers(1, 8))
    values = st.lists(st.floats(-8, 8, width=16), min_size=count, max_size=count)
    group = np.sort(np.array(data.draw(values), dtype=np.float16))
    numbers = st.lists(st.integers(1, 1000), min_size=count, max_size=count)
    costs = np.array(data.draw(numbers), dtype=np.float32)

    def error(start: int, end: int) -> float:
        v, c = group[start:end].astype(np.float64), costs[start:end].astype(np.float64)
        return float((c * (v - np.average(v, weights=c)) ** 2).sum())

    least = min(
        sum(error(a, b) for a, b in pairwise((0, *cuts, count)))
        for clusters in range(1, min(2**bits, count) + 1)
        for cuts in combinations(range(1, count), clusters - 1)
    )
    lut, indices = palettes.kmeans(group[None], bits, costs[None])
    found = costs * (lut[0].astype(np.float64)[indices[0]] - group.astype(np.float64)) ** 2
    # Entries are rounded to fp16: by at most 2**-9 for values up to 8.
    assert found.sum() <= least + costs.sum() * 2.0**-18 + 1e-9


def test_weighted_is_better_where_it_counts() -> None:
    rng = np.random.default_rng(5)
    group = draw("normal", 32 * 512)
    costs = rng.lognormal(0, 2, group.shape).astype(np.float32)

    def cost(lut: np.ndarray, indices: np.ndarray) -> float:
        return float((costs * (lut.astype(np.float64)[0][indices[0]] - group) ** 2).sum())

    weighted = palettes.kmeans(group[None], 3, costs[None])
    values, inverse = np.unique(group, return_inverse=True)
    theirs = cluster(values, 8, weights=np.bincount(inverse, costs))
    exact = np.array(theirs.centroids).astype(np.float16)[None]
    assert cost(*weighted) <= cost(exact, np.array(theirs.clusters)[inverse][None]) * 1.001
    assert cost(*weighted) < 0.99 * cost(*palettes.kmeans(group[None], 3))


@given(groups(65504))
def test_an_index_is_that_of_a_nearest_entry(group: np.ndarray) -> None:
    lut, indices = kmeans(group, 3)
    distances = np.abs(lut.astype(np.float64) - group.astype(np.float64)[:, None])
    np.testing.assert_array_equal(distances[np.arange(len(group)), indices], distances.min(axis=1))


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = draw("student", 40 * 500).reshape(40, 500)
    for choose in (palettes.kmeans, uniform):
        together = choose(rows, 4)
        for cores in (1, 3, 16):
            monkeypatch.setenv("OMP_NUM_THREADS", str(cores))
            again = choose(rows, 4)
            assert [a.tobytes() for a in again] == [a.tobytes() for a in together]
        alone = [choose(row[None], 4) for row in rows]
        np.testing.assert_array_equal(np.concatenate([lut for lut, _ in alone]), together[0])
        np.testing.assert_array_equal(np.concatenate([i for _, i in alone]), together[1])


def test_read_only_weights_are_encoded() -> None:
    group = draw("grid")
    group.flags.writeable = False
    assert kmeans(group, 4)[1].shape == group.shape


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


@pytest.mark.parametrize("bits", BITS)
@given(group=groups(30000))
def test_uniform_indices_are_those_of_numpy(group: np.ndarray, bits: int) -> None:
    low, high = group.min(), group.max()
    fraction = (group - low) / (high - low) if high > low else np.zeros_like(group)
    expected = np.round(fraction * np.float16(2**bits - 1)).astype(np.uint8)
    np.testing.assert_array_equal(uniform(group[None], bits)[1][0], expected)


@pytest.mark.parametrize(
    ("low", "high"), [(-1, 1), (-3e-8, 7e-8), (-32000, 33000), (0, 6e-5), (0.1, 0.7), (-5, -2)]
)
def test_uniform_indices_are_those_of_numpy_for_every_value(low: float, high: float) -> None:
    every = np.arange(0x10000, dtype=np.uint16).view(np.float16)
    group = every[(every >= low) & (every <= high)]
    for bits in BITS:
        fraction = (group - group.min()) / (group.max() - group.min())
        expected = np.round(fraction * np.float16(2**bits - 1)).astype(np.uint8)
        np.testing.assert_array_equal(uniform(group[None], bits)[1][0], expected)
