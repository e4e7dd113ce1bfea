"""The loops of a weight that learns: in torch, as on a GPU, and by kernels, both against numpy."""

from collections.abc import Callable
from inspect import unwrap

import numpy as np
import pytest
import torch
from torch import Tensor

from cetane.compress import parse_format
from cetane.compress.encoded import Dense
from cetane.fitting import loops
from cetane.fitting.tunable import Tunable, tunable

Loop = Callable[..., None]
ROWS, COLUMNS = 12, 37  # no multiple of the kernel's four sums
SIZES = (2, 7, 64)
"""Levels of a row: of one bit, of int4's kind, and the most."""


@pytest.fixture(params=["torch", "kernels"])
def form(request: pytest.FixtureRequest) -> Callable[[Loop], Loop]:
    """Makes a loop one of its two forms."""
    return unwrap if request.param == "torch" else lambda loop: loop


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def choose(count: int, *shape: int) -> Tensor:
    random = torch.Generator().manual_seed(1)
    return torch.randint(0, count, shape, generator=random, dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_gathered(form: Callable[[Loop], Loop], size: int) -> None:
    gradients, indices = draw(ROWS, COLUMNS), choose(size, ROWS, COLUMNS)
    sums, squares = torch.full((ROWS, size), 9.0), torch.full((COLUMNS,), 9.0)  # of before
    form(loops.gather)(gradients, indices, sums, squares)
    wanted = np.zeros((ROWS, size))
    for row, column in np.ndindex(ROWS, COLUMNS):
        wanted[row, indices[row, column]] += float(gradients[row, column])
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(squares, np.square(gradients.double()).sum(0), rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_values_are_looked_up(form: Callable[[Loop], Loop], size: int) -> None:
    levels, indices, values = draw(ROWS, size), choose(size, ROWS, COLUMNS), draw(ROWS, COLUMNS)
    form(loops.look_up)(levels, indices, values)
    np.testing.assert_array_equal(values, np.take_along_axis(levels.numpy(), indices.numpy(), 1))


@pytest.mark.parametrize("size", SIZES)
def test_elements_follow_their_gradients(form: Callable[[Loop], Loop], size: int) -> None:
    """Two steps, by numpy in float64."""
    levels, start = draw(ROWS, size).sort(1).values, draw(ROWS, COLUMNS, seed=2)
    rates, shares = draw(ROWS, seed=3).abs(), draw(COLUMNS, seed=4).abs()
    squares, wanted, means = torch.zeros(ROWS), start.clone(), torch.zeros(ROWS, COLUMNS)
    indices, values = choose(size, ROWS, COLUMNS), torch.empty(ROWS, COLUMNS)
    place, mean, square = start.double().numpy(), np.zeros((ROWS, COLUMNS)), np.zeros(ROWS)
    for number in (1, 2):
        slopes, second = draw(ROWS, COLUMNS, seed=10 + number), 1 - 0.98**number
        form(loops.follow)(
            slopes, levels, rates, shares, 0.9, 0.98, second, squares, wanted, means, indices,
            values,
        )  # fmt: skip
        mean = 0.9 * mean + 0.1 * slopes.double().numpy()
        square = 0.98 * square + 0.02 * np.square((slopes * shares).double()).mean(1).numpy()
        root = np.sqrt(square / second)
        place = place - (rates / root)[:, None].numpy() * shares.numpy() * mean
    np.testing.assert_allclose(squares, square, rtol=1e-5)
    np.testing.assert_allclose(means, mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(wanted, place, rtol=1e-4, atol=1e-5)
    nearest = np.abs(wanted.numpy()[:, :, None] - levels.numpy()[:, None]).argmin(2)
    np.testing.assert_array_equal(indices, nearest)
    np.testing.assert_array_equal(values, np.take_along_axis(levels.numpy(), nearest, 1))


def test_a_wish_on_a_border_has_the_lower_level(form: Callable[[Loop], Loop]) -> None:
    """Also between equal levels, and beyond all of them."""
    levels = torch.tensor([[-1.0, 0.0, 2.0], [1.0, 1.0, 3.0]])
    wanted = torch.tensor([[-0.5, -0.25, 1.0, 9.0], [1.0, 2.0, 2.5, -9.0]])
    indices, values = torch.zeros(2, 4, dtype=torch.uint8), torch.empty(2, 4)
    none = torch.zeros(2, 4)
    form(loops.follow)(
        none, levels, torch.ones(2), torch.ones(4), 0.9, 0.98, 0.02, torch.zeros(2), wanted,
        none.clone(), indices, values,
    )  # fmt: skip
    assert indices.tolist() == [[0, 1, 1, 2], [0, 1, 2, 0]]
    assert values.tolist() == [[-1, 0, 0, 2], [1, 1, 3, 1]]


@pytest.mark.parametrize("length", [2, 4])
def test_vectors_gather_and_look_up(form: Callable[[Loop], Loop], length: int) -> None:
    vectors, count = 3, 16
    gradients, indices = draw(vectors * length, COLUMNS), choose(count, vectors, COLUMNS)
    entries, sums = draw(vectors, count, length, seed=5), torch.full((vectors, count, length), 9.0)
    values = torch.empty(vectors * length, COLUMNS)
    form(loops.gather_vectors)(gradients, indices, sums)
    form(loops.look_up_vectors)(entries, indices, values)
    wanted = np.zeros(sums.shape)
    for row, column in np.ndindex(*gradients.shape):
        vector, axis = divmod(row, length)
        entry = int(indices[vector, column])
        wanted[vector, entry, axis] += float(gradients[row, column])
        assert values[row, column] == entries[vector, entry, axis]
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["palette3-kmeans-group8", "int4-per-channel", "palette2-kmeans-vector2-group8"]
)
def test_a_weight_learns_the_same_by_both_forms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty steps, and a checkpoint in between. Sums of another order may move an element of a
    hundred to another level."""
    weight, wanted = draw(16, 48), draw(16, 48, seed=1)

    def learn() -> Tunable:
        made = parse_format(name).encode(weight.numpy())
        assert not isinstance(made, Dense)
        one = tunable(made, weight)
        for number in range(1, 41):
            if number == 20:
                one.restore({part: tensor.clone() for part, tensor in one.state().items()})
            one.step(one.values - wanted + draw(16, 48, seed=99 + number), 0.002, number, 0.02)
        return one

    by_kernels = learn()
    monkeypatch.setattr(loops, "by_kernel", lambda _: False)
    in_torch = learn()
    torch.testing.assert_close(in_torch.levels, by_kernels.levels, rtol=1e-4, atol=1e-5)
    near = torch.isclose(in_torch.values, by_kernels.values, rtol=1e-4, atol=1e-5)
    assert float(near.float().mean()) > 0.99
    assert float((in_torch.values - wanted).norm()) < 0.99 * float((weight - wanted).norm())
