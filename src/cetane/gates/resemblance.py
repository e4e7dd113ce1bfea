"""Can constants stand for weights? The question where no bit-for-bit comparison serves.

The error of a constant may exceed its format's own by a factor only: as a whole, and every few
output channels. Each single channel must resemble its weights.
"""

from collections.abc import Mapping

import numpy as np

from cetane.compress import Format, Palette, palettes
from cetane.compress.encoded import Affine, Encoded, Half, Palettized
from cetane.engine.backend import Array

MOST_ERROR = 4.0
"""The largest squared error of a weighted or fitted constant, in multiples of the plain format's
error for the same parameter. At four bits, another matrix's palette errs by more than 100 times.
Two bits of SmolLM2 that were rounded and tuned err by 2.5 times at most."""
BLOCK, MOST_BLOCK_ERROR = 8, 8.0
"""The number of output channels that are judged together, and their largest error, as in
`MOST_ERROR`. At four bits, other channels in their place err by more. The worst of the same SmolLM2
err by 3.8 times."""
LIKE = 0.25
"""The least cosine between an output channel and its weights, in multiples of the plain format's. A
channel of zeros or another's has about 0: at two bits its error alone could hide among those of the
seven beside it. The least of SmolLM2 in two bits is 0.48, of Gemma 3 270M in four 0.53. Channels
that are small in their group are left out by the multiple: no entry of their palette is near."""
CHANCE = 4.0
"""Standard deviations within which the sum of independent errors lies. Beyond them, the errors
along the weights are no chance."""


def too_far(parts: Mapping[str, Array], values: Array, form: Format) -> str | None:
    """Why a constant cannot have been fitted to these weights; None if it can.

    It cannot if it errs far more than its format must. Whether the fitting helped, the checks of
    compression judge."""
    plain = form.encode(values)
    if arrays(plain).keys() != parts.keys():
        return f"it is stored as {', '.join(sorted(parts))}, not as {form.name}"
    if any(array.shape != parts[name].shape for name, array in arrays(plain).items()):
        return f"its arrays have not the shapes of {form.name}"
    if isinstance(plain, Palettized):
        given = Palettized(parts["indices"], parts["lut"], form.bits).decode()
    else:
        given = Affine(parts["data"], parts["scale"], form.bits).decode()
    nearest = plain.decode()
    worse = times_best(given, nearest, values, len(values))[0]
    if not worse <= MOST_ERROR:
        return f"its values err by {worse:.3g} times what they need to"
    blocks = times_best(given, nearest, values, BLOCK)
    if not (blocks <= MOST_BLOCK_ERROR).all():
        at = int(np.argmax(np.nan_to_num(blocks, nan=np.inf)))
        channels = f"{BLOCK * at} to {min(BLOCK * (at + 1), len(values)) - 1}"
        return f"its channels {channels} err by {blocks[at]:.3g} times what they need to"
    return unlike(given, nearest, values)


def unlike(given: Array, plain: Array, values: Array) -> str | None:
    """The first output channel of `given` that cannot stand for its weights; None if all can.

    All arrays are `(O, I, ...)`.
    """
    like, best = cosines(given, values), cosines(plain, values)
    wrong = np.flatnonzero(~(like >= LIKE * best))
    if not len(wrong):
        return None
    at = wrong[0]
    return (
        f"its channel {at} has a cosine of {like[at]:.3g} with its weights, where {best[at]:.3g} "
        "can be reached"
    )


def cosines(given: Array, values: Array) -> Array:
    """The cosine between every output channel `(O, I, ...)` and its weights, `(O,)`; 0 for a
    channel of zeros, and 1 where the weights are zeros."""
    rows, made = (array.reshape(len(array), -1).astype(np.float64) for array in (values, given))
    along, size, length = (made * rows).sum(1), (rows * rows).sum(1), (made * made).sum(1)
    found: Array = np.where(size > 0, along / np.sqrt(np.maximum(size * length, 1e-60)), 1.0)
    return found


def times_best(given: Half, plain: Half, values: Array, block: int) -> Array:
    """The error of `given` over that of `plain`, for every `block` output channels: of the squared
    error and of the error along the weights, the larger ratio.

    All arrays are `(O, I, ...)`.

    For a palette of nearest entries both errors are equal. For weights that are a little too large,
    the one along them is much larger. It is too where a format makes weights nearly exactly: the
    rounding of a scale to fp16 moves all of a channel one way. So `plain` has this part too.
    """
    rows = values.reshape(len(values), -1)
    starts = np.arange(0, len(rows), block)
    whole, along = errors(given, rows, starts)
    best, usual = errors(plain, rows, starts)
    times: Array = np.maximum(
        (whole - 1e-12) / np.maximum(best, 1e-30),
        (along - 1e-12) / np.maximum(np.maximum(best, usual), 1e-30),
    )
    return times


def errors(made: Half, rows: Array, starts: Array) -> tuple[Array, Array]:
    """The squared error of weights `(O, I)`, and the product of error and weights beyond chance;
    sums of the output channels from each start to the next."""
    error = made.astype(np.float32).reshape(rows.shape) - rows
    shared = error * rows
    whole, along, spread = (
        np.add.reduceat(products.sum(1, dtype=np.float64), starts)
        for products in (error * error, shared, shared * shared)
    )
    return whole, np.abs(along) - CHANCE * np.sqrt(spread)


def arrays(encoded: Encoded) -> dict[str, Array]:
    """A constant as arrays, by the inputs of the op that decodes it."""
    if isinstance(encoded, Palettized) and encoded.lut.shape[-1] > 1:
        return encoded.arrays | {"vector_axis": np.array(0, np.int32)}
    return encoded.arrays


def wrong_palette(parts: Mapping[str, Array], values: Array, form: Format) -> str | None:
    """Why indices and palettes `(groups, ..., 2**bits, 1)` cannot be of these weights."""
    assert isinstance(form, Palette)
    if parts.keys() != {"indices", "lut"}:
        return f"it is stored as {', '.join(sorted(parts))}, not as a palette"
    shapes = {"indices": form.indices_shape(values.shape), "lut": form.lut_shape(values.shape)}
    if any(parts[name].shape != shape for name, shape in shapes.items()):
        return f"its arrays have not the shapes of {form.name}"
    lut = parts["lut"].astype(np.float32)
    groups = len(lut)
    rows, indices = values.reshape(groups, -1), parts["indices"].reshape(groups, -1)
    lut = lut.reshape(groups, -1)
    given = np.take_along_axis(lut, indices.astype(np.int64), 1)
    error = 0.0
    for row, made, entries in zip(rows.astype(np.float32), given, lut, strict=True):
        ascending = np.sort(entries)
        above = np.searchsorted(ascending, row).clip(1, len(ascending) - 1)
        around = ascending[above - 1], ascending[above]
        nearest = np.minimum(*(np.abs(entry - row) for entry in around))
        chosen = np.abs(made - row)
        if (chosen > nearest * (1 + 1e-6) + 1e-12).any():
            return "an index does not name the nearest entry of its palette"
        error += float(np.square(chosen).sum())
    even, places = palettes.kmeans(rows, form.bits)
    plain = np.take_along_axis(even, places, 1)
    best = float(np.square(plain.astype(np.float32) - rows).sum())
    if not error <= MOST_ERROR * best + 1e-12:
        return f"its palettes err by {error / max(best, 1e-30):.3g} times what they need to"
    return unlike(given.reshape(values.shape), plain.reshape(values.shape), values)
