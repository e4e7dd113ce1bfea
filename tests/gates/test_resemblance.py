"""Constants that no bit-for-bit comparison judges: wrong ones are far from their weights, and what
formats or fitting leave is not."""

from collections.abc import Callable

import numpy as np
import pytest

from cetane.compress import parse_format
from cetane.compress.encoded import Half
from cetane.gates.resemblance import (
    BLOCK,
    MOST_BLOCK_ERROR,
    arrays,
    times_best,
    too_far,
    unlike,
    wrong_palette,
)

WEIGHT = np.random.default_rng(4).normal(size=(32, 24)).astype(np.float16)


@pytest.mark.parametrize(
    ("made_as", "change", "problem"),
    [
        ("palette4-kmeans-group8", None, None),
        ("palette4-kmeans-per-tensor", None, "shapes"),
        ("palette6-kmeans-group8", None, "shapes"),
        ("palette4-kmeans-group8", np.nan, "times what they need to"),
        ("palette4-kmeans-group8", 2.0, "nearest entry"),
    ],
)
def test_palettes_without_their_sensitivities(
    made_as: str, change: float | None, problem: str | None
) -> None:
    made = parse_format(made_as).encode(WEIGHT)
    lut = made.lut if change is None else made.lut * np.float16(change)
    parts = {"indices": made.indices, "lut": lut}
    found = wrong_palette(parts, WEIGHT, parse_format("palette4-weighted-group8"))
    assert found is None if problem is None else problem in str(found)


def test_a_palette_of_zeros_among_others() -> None:
    """Its zeros are the nearest that it has, and hide among the errors of three right palettes."""
    made = parse_format("palette2-kmeans-group8").encode(WEIGHT)
    lut = made.lut.copy()
    lut[2] = 0
    found = wrong_palette({"indices": made.indices, "lut": lut}, WEIGHT,
                          parse_format("palette2-weighted-group8"))  # fmt: skip
    assert "channel 16 " in str(found)


MATRIX = np.random.default_rng(5).normal(size=(64, 96)).astype(np.float32)
SWAPPED = [*range(8), 16, *range(9, 16), 8, *range(17, 64)]
WRONG: dict[str, Callable[[Half], Half]] = {
    "all too large": lambda made: made * np.float16(1.15),
    "one channel too large": lambda made: np.concatenate([made[:8], made[8:9] * 2, made[9:]]),
    "one channel of zeros": lambda made: np.concatenate([made[:8], made[8:9] * 0, made[9:]]),
    "two channels changed places": lambda made: made[SWAPPED],
    "another sign": lambda made: -made,
    "not a number": lambda made: made * np.float16("nan"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["palette4-kmeans-group8", "int4-per-channel"])
def test_fitted_constants_without_their_file(name: str, wrong: str) -> None:
    """They are not the nearest, and near enough. A wrong channel does not hide among right ones."""
    form = parse_format(name)
    fitted = form.encode(MATRIX + np.random.default_rng(6).normal(size=MATRIX.shape) * 0.06)
    assert too_far(arrays(fitted), MATRIX, form) is None
    times = times_best(fitted.decode(), form.encode(MATRIX).decode(), MATRIX, BLOCK)
    assert times.min() > 1
    changed = times_best(WRONG[wrong](fitted.decode()), form.encode(MATRIX).decode(), MATRIX, BLOCK)
    assert not (changed <= MOST_BLOCK_ERROR).all()


SIGNS = np.random.default_rng(7).integers(-1, 2, MATRIX.shape).astype(np.float32)
STEP = np.abs(MATRIX).max(1, keepdims=True).astype(np.float16).astype(np.float32) / 7
EXACT: dict[str, tuple[str, np.ndarray]] = {
    "all weights equal": ("palette4-kmeans-group8", np.full_like(MATRIX, 0.1)),
    "a scale and signs": ("palette2-kmeans-group8", SIGNS * np.float32(0.0123)),
    "a scale for each channel": ("int4-per-channel", SIGNS * STEP * np.float32(1.0001)),
    "already four bits": ("int4-per-channel", (MATRIX / STEP).round() * STEP),
    "eight equal channels": (
        "palette4-kmeans-group8", np.concatenate([MATRIX[:8], 0 * MATRIX[:8] + 0.3, MATRIX[16:]]),
    ),
    "a turned outlier": ("palette4-kmeans-group8", MATRIX + 300 * SIGNS[:1] * (SIGNS[:, :1] == 1)),
}  # fmt: skip
"""Weights that a format makes nearly exactly: what is left is one entry's or one scale's fp16."""


@pytest.mark.parametrize("kind", EXACT)
def test_a_formats_own_rounding_is_never_too_far(kind: str) -> None:
    """Wrong constants are, by any of the plants: they err far more than fp16 does."""
    name, values = EXACT[kind]
    form = parse_format(name)
    plain = form.encode(values)
    assert too_far(arrays(plain), values, form) is None
    part = "scale" if "int4" in name else "lut"
    right = arrays(plain)
    for factor in (0.5, 0.9, 1.05, 1.15, 2.0, -1.0):
        assert too_far(right | {part: right[part] * np.float16(factor)}, values, form)
    codes = next(key for key in right if key in ("indices", "data"))
    other = arrays(form.encode(MATRIX[::-1].copy()))
    wrong = [other, right | {part: np.zeros_like(right[part])}]
    if kind != "all weights equal":  # any two of their channels are the same
        wrong.append(right | {codes: right[codes][SWAPPED]})
    assert all(too_far(parts, values, form) for parts in wrong)


@pytest.mark.parametrize("wrong", ["one channel too large", "two channels changed places"])
def test_large_equal_channels_hide_no_wrong_one(wrong: str) -> None:
    """The part along the weights that their fp16 leaves is larger than all weights beside them."""
    values = np.concatenate([MATRIX[:9], 0 * MATRIX[:7] + 30.007, MATRIX[16:]])
    form = parse_format("int4-per-channel")
    right = form.encode(values)
    assert too_far(arrays(right), values, form) is None
    changed = WRONG[wrong](right.decode())
    assert times_best(changed, right.decode(), values, BLOCK)[1] > MOST_BLOCK_ERROR


@pytest.mark.parametrize("wrong", ["one channel of zeros", "two channels changed places"])
def test_a_wrong_channel_of_two_bits(wrong: str) -> None:
    """Its error hides among those of the channels beside it. Its direction does not."""
    form = parse_format("palette2-kmeans-group8")
    fitted = form.encode(MATRIX + np.random.default_rng(6).normal(size=MATRIX.shape) * 0.6)
    assert too_far(arrays(fitted), MATRIX, form) is None
    changed = WRONG[wrong](fitted.decode())
    plain = form.encode(MATRIX).decode()
    assert (times_best(changed, plain, MATRIX, BLOCK) <= MOST_BLOCK_ERROR).all()
    assert "channel 8 " in str(unlike(changed, plain, MATRIX))


def test_a_channel_that_no_palette_serves() -> None:
    """It is small beside the others of its group, so even plain palettes turn it."""
    small = np.concatenate([MATRIX[:8], MATRIX[8:9] * 0.01, MATRIX[9:]])
    form = parse_format("palette2-kmeans-group8")
    assert too_far(arrays(form.encode(small)), small, form) is None
    small[8] = 0
    assert too_far(arrays(form.encode(small)), small, form) is None
