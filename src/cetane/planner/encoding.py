"""A model's weights as the constants that a recipe's compression makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from cetane.compress import Format, Selection, second_order
from cetane.compress.formats import Palette
from cetane.errors import CetaneError
from cetane.planner.weights import format_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cetane.compress.encoded import Affine, Encoded, Palettized
    from cetane.compress.sensitivity import Sensitivities
    from cetane.families import Weight, Weights

LARGEST_INPUTS = 16384
"""The most inputs of experts that are rounded as one matrix: their products take 1 GB."""


class Encoder:
    """Encodes weights by one compression; reads a weight, and what was fitted to it, on each
    call."""

    def __init__(self, weights: Weights, compression: Selection) -> None:
        """Raises CetaneError if a file that the compression names is missing or changed, and if its
        method needs fitted constants that do not exist yet."""
        if compression.method != "plain" and compression.fitted is None:
            raise CetaneError(
                f"compression.method = {compression.method!r}: nothing is fitted yet",
                "cetane port fits the constants before it builds",
            )
        self.weights, self.compression = weights, compression
        counted, fitted = compression.sensitivity, compression.fitted
        self.sensitivities: Sensitivities | None = counted.read() if counted else None
        self.fitted = fitted.read() if fitted else None

    @property
    def fitted_by(self) -> str:
        """The hashes of what constants depend on beside a weight and its format."""
        files = self.compression.sensitivity, self.compression.fitted
        return " ".join(file.sha256 for file in files if file is not None)

    def __call__(self, weight: Weight, halves: NDArray[np.float16] | None = None) -> Encoded:
        """The fitted constants of a weight, else those that the format makes of its fp16 values.

        `halves` are these values, if the caller has them.
        """
        own = self._fitted(weight)
        if own is not None:
            with naming(weight):
                return own.times(weight.factor)
        form, counts = format_of(weight, self.compression), None
        if self.sensitivities and form.weighted:
            counts = self.sensitivities.of(weight.name, weight.shape, weight.columns)
        values = weight.read(self.weights).to(torch.float16).numpy() if halves is None else halves
        with naming(weight):
            return form.encode(values, counts)

    def is_fitted(self, weight: Weight) -> bool:
        """Whether the constants of a weight come from the file of fitted constants."""
        return self._fitted(weight) is not None

    def _fitted(self, weight: Weight) -> Affine | Palettized | None:
        """The constants of a weight without its factor."""
        form = format_of(weight, self.compression)
        if self.fitted is None or not can_be_fitted(weight, form):
            return None
        rows = None if weight.of_experts else weight.rows
        return self.fitted.of(weight.matrix, weight.shape, form, rows, weight.columns)


@contextmanager
def naming(weight: Weight) -> Iterator[None]:
    """A context whose errors name a weight."""
    try:
        yield
    except CetaneError as error:
        raise CetaneError(f"{weight.name}: {error.message}", error.hint) from error


def can_be_fitted(weight: Weight, form: Format) -> bool:
    """Whether a weight can have fitted constants. Its format must have levels to choose among. It
    must be one of these, which a factor may multiply:

    - a matrix of the checkpoint, or its transpose;
    - rows or columns of one, or transposed rows of each head;
    - a matrix of experts.
    """
    if weight.of_experts:
        return experts_can_be_fitted(weight, form)
    if weight.kind is None or len(weight.stored) != 2:
        return False
    if weight.head_pick is not None:
        inputs = weight.stored[1]  # a head's outputs in the port
        return second_order.serves(form, weight.shape) and one_by_one(form, inputs)
    if weight.pick is not None:
        return weight.row_pick is not None and second_order.serves(form, weight.shape)
    if isinstance(form, Palette) and weight.rows and weight.rows[0] % (form.group or form.vector):
        return False  # it begins inside a group or a vector
    return second_order.serves(form, weight.stored)


def experts_can_be_fitted(weight: Weight, form: Format) -> bool:
    """`can_be_fitted` for experts.

    Gates and ups of several experts are rounded one by one, so none may share a palette. Outputs of
    several share their palettes, and are rounded as one matrix.
    """
    assert weight.rows is not None
    count = weight.rows[1] - weight.rows[0]
    if weight.shape[1] > LARGEST_INPUTS or not second_order.serves(form, weight.shape):
        return False
    return count == 1 or weight.side_by_side or one_by_one(form, weight.shape[0] // count)


def one_by_one(form: Format, rows: int) -> bool:
    """Whether parts of a matrix with so many rows each can be rounded one by one: none may share a
    palette."""
    if not isinstance(form, Palette):
        return True
    return form.group is not None and rows % form.group == 0
