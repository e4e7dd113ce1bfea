"""The values that weights are rounded to: palettes, or integers times a scale."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np

from cetane.compress.encoded import LARGEST, Affine, Encoded, Half, Palettized, largest_scale
from cetane.compress.formats import Format, Palette, Shape
from cetane.compress.rounding_problem import Indices, Matrix, RoundingProblem
from cetane.threads import over_rows

RIDGE = 1e-4
"""The ridge of a palette's normal equations, as a share of their mean diagonal. It keeps entries
that few weights use near their places."""
CLIPS = np.linspace(0.6, 1.0, 9, dtype=np.float32)
"""The shares of a row's largest weight that are tried as the reach of its first scale."""


class Levels(ABC):
    """The values that the weights of every row can become."""

    @property
    @abstractmethod
    def rows(self) -> Matrix:
        """Ascending, `(O, K)`; those of vectors `(O / V, V, K)`, in any order."""

    @abstractmethod
    def fitted(self, indices: Indices, gradients: Matrix) -> "tuple[Levels, Indices]":
        """The best levels for given indices, and these indices in the order of the new levels.

        `gradients` belong to the given indices.
        """

    @abstractmethod
    def encoded(self, indices: Indices, shape: Shape) -> Encoded:
        """The constants of a weight of this shape, with its columns in their first order again."""


def first_levels(problem: RoundingProblem, form: Format) -> Levels:
    """The levels of the first round, by the Hessian's diagonal alone."""
    diagonal = np.ascontiguousarray(np.diagonal(problem.hessian))
    if isinstance(form, Palette):
        made = replace(form, mode="weighted").encode(problem.weight, diagonal[None])
        lut = made.lut.reshape(len(made.lut), -1, form.vector).astype(np.float32)
        return PaletteLevels(problem, lut, form)
    limit = 2 ** (form.bits - 1) - 1
    largest = np.abs(problem.weight).max(1)
    scales = largest[None] * CLIPS[:, None] / limit
    costs = np.stack([rounding_cost(problem.weight, scale, limit, diagonal) for scale in scales])
    best = np.take_along_axis(scales, costs.argmin(0)[None], 0)[0]
    return LinearLevels(problem, best, form.bits)


def rounding_cost(weight: Matrix, scale: Matrix, limit: int, diagonal: Matrix) -> Matrix:
    """The error `(O,)` of rounding each row plainly to its `scale (O,)`, by the diagonal `(I,)`."""
    scale = np.maximum(scale, np.finfo(np.float32).tiny)[:, None]
    off = np.clip(np.rint(weight / scale), -limit, limit) * scale - weight
    return np.asarray(np.square(off) @ diagonal, dtype=np.float32)


@dataclass(frozen=True)
class PaletteLevels(Levels):
    """One palette of vectors, fp32 `(groups, K, V)`, for each group of rows."""

    problem: RoundingProblem
    lut: Matrix
    form: Palette

    @property
    def rows(self) -> Matrix:
        groups, _, length = self.lut.shape
        count = len(self.problem.weight) // (groups * length)
        vectors = np.repeat(self.lut.transpose(0, 2, 1), count, axis=0)
        return vectors[:, 0] if length == 1 else np.ascontiguousarray(vectors)

    def fitted(self, indices: Indices, gradients: Matrix) -> "tuple[PaletteLevels, Indices]":
        """A Newton step. All rows of a vector have the same normal equations here, those of their
        mean count. So they are solved once, and the step's length makes up for what that misses.
        """
        from cetane.compress import feedback  # here because numba takes a while to load

        problem, (groups, size, length) = self.problem, self.lut.shape
        own = indices.reshape(groups, -1, indices.shape[1])
        counts = problem.counts.reshape(groups, -1, length).mean(2)
        products = np.empty((groups, size, size))
        over_rows(
            lambda *rows: feedback.normal_equations(*rows, problem.hessian), own, counts, products
        )
        places = own.reshape(groups, -1) + size * np.arange(groups)[:, None]
        slopes = gradients.reshape(groups, -1, length, indices.shape[1])
        sums = [np.bincount(places.ravel(), slopes[:, :, axis].ravel(), groups * size)
                for axis in range(length)]  # fmt: skip
        ridge = RIDGE * np.trace(products, axis1=1, axis2=2)[:, None, None] / size + 1e-30
        step = np.linalg.solve(
            products + ridge * np.eye(size), np.stack(sums, 1).reshape(self.lut.shape)
        )
        moved = replace(self, lut=np.asarray(step, dtype=np.float32))
        share = problem.step_length(problem.rounded(moved.rows, indices), gradients)
        return self.sorted(self.lut + moved.lut * share, indices)

    def sorted(self, lut: Matrix, indices: Indices) -> "tuple[PaletteLevels, Indices]":
        """These entries, rounded to fp16, and the indices that name them; single ones ascend."""
        order = lut[:, :, :1].argsort(1, kind="stable")
        bounded = np.clip(np.take_along_axis(lut, order, 1), -LARGEST, LARGEST)
        rounded = bounded.astype(np.float16).astype(np.float32)
        places = order[:, :, 0].argsort(1).astype(np.uint8)
        renamed = np.take_along_axis(places, indices.reshape(len(lut), -1), 1)
        return replace(self, lut=rounded), renamed.reshape(indices.shape)

    def encoded(self, indices: Indices, shape: Shape) -> Palettized:
        own = np.ascontiguousarray(indices[:, self.problem.back])
        lut = self.lut.astype(np.float16).reshape(self.form.lut_shape(shape))
        return Palettized(own.reshape(self.form.indices_shape(shape)), lut, self.form.index_bits)


@dataclass(frozen=True)
class LinearLevels(Levels):
    """Integers from −limit to limit times a scale `(O,)`, fp32 rounded to fp16."""

    problem: RoundingProblem
    scale: Matrix
    bits: int

    @property
    def limit(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def stored_scale(self) -> Half:
        """The scale as it is stored."""
        return np.minimum(self.scale, largest_scale(self.limit)).astype(np.float16)

    @property
    def integers(self) -> Matrix:
        return np.arange(-self.limit, self.limit + 1, dtype=np.float32)

    @property
    def rows(self) -> Matrix:
        return self.integers * self.stored_scale.astype(np.float32)[:, None]

    def fitted(self, indices: Indices, gradients: Matrix) -> "tuple[LinearLevels, Indices]":
        chosen = self.integers[indices]
        weighted = chosen @ self.problem.hessian
        squares = (weighted * chosen).sum(1)
        scale = (weighted * self.problem.weight).sum(1) / np.where(squares > 0, squares, 1)
        return replace(self, scale=np.where(scale > 0, scale, self.scale)), indices

    def encoded(self, indices: Indices, shape: Shape) -> Affine:
        own = indices[:, self.problem.back].astype(np.int16) - self.limit
        scale = self.stored_scale.reshape(-1, *[1] * (len(shape) - 1))
        return Affine(own.astype(np.int8).reshape(shape), scale, self.bits)
