"""Rounding that makes up for its own errors: GPTQ, for palettes of output groups and for integers.

A layer's output errs by (weight − rounded) · x, so its squared error is a quadratic form with the
Hessian H = mean(x xᵀ) of the layer's inputs. Columns are rounded one after another. The error of a
column moves the columns that are not rounded yet, so that the output changes least (Frantar et al.,
arXiv 2210.17323). Then the levels, which are palettes or scales, are fitted to the same form, as
GPTVQ does (arXiv 2402.15319). Rounding and fitting are repeated (`ROUNDS`).

coremltools has this for linear weights alone (`optimize.torch.layerwise_compression`), and no
library has it for palettes that output channels share; so it is written here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cetane.compress import palettes
from cetane.compress.encoded import Affine, Encoded, Palettized
from cetane.compress.formats import Format, Linear, Palette, Shape
from cetane.compress.select import AS_GPTQ, SecondOrder
from cetane.errors import CetaneError

Matrix = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]

OUTPUT_DAMPING = 1.0
"""The damping of the outputs' Hessian, as `SecondOrder.damping` is that of the inputs'.

This Hessian rests on few gradients. With 0.05 the error that it predicts grew by a tenth on another
text, with 1.0 it fell by a tenth."""
ROUNDS = 2
"""Rounds of rounding and fitting. A third one changed a layer's error by less than 0.2 %."""
BLOCK = 128
"""Columns that are rounded before one product moves all columns behind them."""
ROWS = 64
"""Rows that are rounded before one product moves all rows below, if rows make up for each other."""
RIDGE = 1e-4
"""The ridge of a palette's normal equations, as a share of their mean diagonal. It keeps entries
that few weights use near their places."""
CLIPS = np.linspace(0.6, 1.0, 9, dtype=np.float32)
"""The shares of a row's largest weight that are tried as the reach of its first scale."""
MOST_BITS = 6
"""The most bits that are rounded so. With more, plain rounding is as good, and the equations of a
palette are large."""


def serves(form: Format, shape: Shape) -> bool:
    """Whether `encode` rounds a weight of this shape to the format."""
    if len(shape) < 2 or form.bits > MOST_BITS:
        return False
    if isinstance(form, Palette):
        return form.vector == 1
    return isinstance(form, Linear) and form.per == "channel"


def encode(
    weight: Matrix,
    form: Format,
    hessian: Matrix,
    outputs: Matrix | None = None,
    options: SecondOrder = AS_GPTQ,
) -> Encoded:
    """The constants of a weight, fp32 `(O, I, ...)`, whose output errs least.

    `hessian` is the mean product of the inputs, fp32 `(I, I)`; the axes behind I have length 1.
    `outputs (O, O)` says how errors of the outputs count together; by default all count alike.
    CetaneError for a format that `serves` refuses, and for a Hessian that does not fit.
    """
    if not serves(form, weight.shape):
        raise CetaneError(f"{form.name} has no second order")
    rows = np.ascontiguousarray(weight.reshape(len(weight), -1), dtype=np.float32)
    if hessian.shape != (rows.shape[1],) * 2:
        raise CetaneError(
            f"a Hessian of shape {hessian.shape} does not fit a weight of shape {weight.shape}"
        )
    form.check(weight.shape, "the weight")
    together = None if outputs is None else damped(outputs, OUTPUT_DAMPING)
    problem = Problem(rows, damped(hessian, options.damping), together, options.order == "largest")
    levels = first_levels(problem, form)
    indices = np.empty(rows.shape, dtype=np.uint8)
    for _ in range(ROUNDS):
        indices = problem.round(levels.rows)
        gradients = problem.descend(levels.rows, indices)
        levels, indices = levels.fitted(problem, indices, gradients)
    return levels.encoded(indices, weight.shape)


def damped(hessian: Matrix, damping: float) -> Matrix:
    """The Hessian, with `damping` times the mean of its diagonal added there.

    So it can be inverted, even for inputs that are always zero.
    """
    mean = float(np.diagonal(hessian).mean(dtype=np.float64)) or 1.0
    identity = np.eye(len(hessian), dtype=np.float32)
    return np.ascontiguousarray(hessian + np.float32(damping * mean) * identity)


class Problem:
    """A weight `(O, I)` and the quadratic form that its errors are measured in.

    Columns are kept in the order of their rounding. With `largest`, those with the largest diagonal
    come first: they count most, and most columns can still make up for them.
    """

    def __init__(
        self, weight: Matrix, hessian: Matrix, outputs: Matrix | None = None, largest: bool = True
    ) -> None:
        diagonal = np.diagonal(hessian)
        self.order = np.argsort(-diagonal, kind="stable") if largest else np.arange(len(diagonal))
        self.back = np.argsort(self.order)
        self.weight = np.ascontiguousarray(weight[:, self.order])
        self.hessian = np.ascontiguousarray(hessian[self.order][:, self.order])
        self.factor = inverse_factor(self.hessian)
        self.outputs = outputs
        self.row_factor = None if outputs is None else inverse_factor(outputs)

    @property
    def blocks(self) -> list[slice]:
        columns = self.weight.shape[1]
        return [slice(at, min(at + BLOCK, columns)) for at in range(0, columns, BLOCK)]

    @property
    def row_blocks(self) -> list[tuple[slice, slice]]:
        """Each block of rows, with all rows below it."""
        count = len(self.weight)
        stops = [(at, min(at + ROWS, count)) for at in range(0, count, ROWS)]
        return [(slice(at, stop), slice(stop, count)) for at, stop in stops]

    @property
    def counts(self) -> Matrix:
        """How much the errors of a row count, `(O,)`."""
        if self.outputs is None:
            return np.ones(len(self.weight), dtype=np.float32)
        return np.ascontiguousarray(np.diagonal(self.outputs))

    def gradients(self, rounded: Matrix) -> Matrix:
        """Half the rate at which the error falls as each rounded value grows, `(O, I)`."""
        off = self.weight - rounded
        together = off if self.outputs is None else self.outputs @ off
        return np.asarray(together @ self.hessian, dtype=np.float32)

    def round(self, levels: Matrix) -> Indices:
        """The index of a level for every weight, `(O, I)`; later weights make up for each error.

        `levels (O, K)` ascend.
        """
        from cetane.compress import feedback, kernels  # here because numba takes a while to load

        moved = np.zeros_like(self.weight)
        indices = np.empty(moved.shape, dtype=np.uint8)
        for block in self.blocks:
            factor = np.ascontiguousarray(self.factor[block, block])
            weight, part = self.weight[:, block].copy(), moved[:, block].copy()
            chosen, errors = np.empty(part.shape, np.uint8), np.empty_like(part)
            if self.row_factor is None:
                kernels.over_rows(
                    lambda *rows, f=factor: feedback.round_block(*rows, f),
                    weight + part, levels, chosen, errors,
                )  # fmt: skip
            else:
                for rows, below in self.row_blocks:
                    feedback.round_rows(
                        weight[rows], part[rows], levels[rows], chosen[rows], errors[rows],
                        np.ascontiguousarray(self.row_factor[rows, rows]), factor,
                    )  # fmt: skip
                    weight[below] -= self.row_factor[rows, below].T @ weight[rows]
            indices[:, block] = chosen
            moved[:, block.stop :] -= errors @ self.factor[block, block.stop :]
        return indices

    def descend(self, levels: Matrix, indices: Indices) -> Matrix:
        """Improve indices in place, column by column, once. Returns the gradients afterwards."""
        from cetane.compress import feedback, kernels

        gradients = self.gradients(np.take_along_axis(levels, indices, 1))
        for block in self.blocks:
            own = np.ascontiguousarray(self.hessian[block, block])
            part = gradients[:, block].copy()  # the loops change it
            chosen, changes = np.ascontiguousarray(indices[:, block]), np.empty_like(part)
            if self.outputs is None:
                kernels.over_rows(
                    lambda *rows, h=own: feedback.descend_block(*rows, h),
                    part, levels, chosen, changes,
                )  # fmt: skip
            else:
                for rows, below in self.row_blocks:
                    together = np.ascontiguousarray(self.outputs[rows, rows])
                    feedback.descend_rows(
                        part[rows], levels[rows], chosen[rows], changes[rows], together, own
                    )
                    part[below] -= self.outputs[below, rows] @ (changes[rows] @ own)
                changes = self.outputs @ changes
            indices[:, block] = chosen
            gradients -= changes @ self.hessian[block]
        return gradients

    def length(self, step: Matrix, gradients: Matrix) -> np.float32:
        """The factor of a step of all rounded values that lowers the error most."""
        step = step.reshape(self.weight.shape)
        other = step if self.outputs is None else self.outputs @ step
        falls = float(np.vdot(step, gradients))
        return np.float32(falls / max(float(np.vdot(step @ self.hessian, other)), 1e-30))


def inverse_factor(hessian: Matrix) -> Matrix:
    """The upper Cholesky factor of a Hessian's inverse, fp32, computed in float64.

    GPTQ's recursion needs the upper U of inverse = Uᵀ U. It is the inverse of the Hessian's own
    factor, taken from the last row up: less work than to invert the Hessian and factor that.
    """
    import torch

    flipped = torch.from_numpy(np.ascontiguousarray(hessian[::-1, ::-1], dtype=np.float64))
    upper = torch.linalg.cholesky(flipped).flip(0, 1)
    identity = torch.eye(len(upper), dtype=torch.float64)
    factor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return np.ascontiguousarray(factor.numpy(), dtype=np.float32)


class Levels(ABC):
    """The values that the weights of every row can become."""

    @property
    @abstractmethod
    def rows(self) -> Matrix:
        """Ascending, `(O, K)`."""

    @abstractmethod
    def fitted(
        self, problem: Problem, indices: Indices, gradients: Matrix
    ) -> "tuple[Levels, Indices]":
        """The best levels for given indices, and these indices in the order of the new levels.

        `gradients` belong to the given indices.
        """

    @abstractmethod
    def encoded(self, indices: Indices, shape: Shape) -> Encoded:
        """The constants of a weight of this shape, with its columns in their first order again."""


def first_levels(problem: Problem, form: Format) -> Levels:
    """The levels of the first round, by the Hessian's diagonal alone."""
    diagonal = np.diagonal(problem.hessian)
    if isinstance(form, Palette):
        groups = form.groups(problem.weight.shape)
        halves = problem.weight.astype(np.float16).reshape(groups, -1)
        costs = np.broadcast_to(diagonal, problem.weight.shape).reshape(groups, -1)
        lut, _ = palettes.kmeans(halves, form.bits, np.ascontiguousarray(costs))
        return PaletteLevels(problem, lut.astype(np.float32), form.bits)
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
    """One palette, fp32 `(groups, 2**bits)`, for each group of rows."""

    problem: Problem
    lut: Matrix
    bits: int

    @property
    def rows(self) -> Matrix:
        return np.repeat(self.lut, len(self.problem.weight) // len(self.lut), axis=0)

    def fitted(
        self, problem: Problem, indices: Indices, gradients: Matrix
    ) -> "tuple[PaletteLevels, Indices]":
        from cetane.compress import feedback, kernels

        groups, size = self.lut.shape
        own = indices.reshape(groups, -1, indices.shape[1])
        products = np.empty((groups, size, size))
        kernels.over_rows(
            lambda *rows: feedback.normal_equations(*rows, problem.hessian),
            own, problem.counts.reshape(groups, -1), products,
        )  # fmt: skip
        places = indices.reshape(groups, -1) + size * np.arange(groups)[:, None]
        sums = np.bincount(places.ravel(), gradients.ravel(), groups * size).reshape(groups, size)
        ridge = RIDGE * np.trace(products, axis1=1, axis2=2)[:, None, None] / size + 1e-30
        step = np.linalg.solve(products + ridge * np.eye(size), sums[:, :, None])[:, :, 0]
        step = np.asarray(step, dtype=np.float32)
        lut = self.lut + step * problem.length(step.ravel()[places], gradients)
        order = lut.argsort(1, kind="stable")
        rounded = np.take_along_axis(lut, order, 1).astype(np.float16).astype(np.float32)
        places = order.argsort(1).astype(np.uint8)
        sorted_indices = np.take_along_axis(places, indices.reshape(groups, -1), 1)
        return PaletteLevels(problem, rounded, self.bits), sorted_indices.reshape(indices.shape)

    def encoded(self, indices: Indices, shape: Shape) -> Palettized:
        lut_shape = (len(self.lut), *[1] * (len(shape) - 1), 2**self.bits, 1)
        own = np.ascontiguousarray(indices[:, self.problem.back])
        lut = self.lut.astype(np.float16).reshape(lut_shape)
        return Palettized(own.reshape(shape), lut, self.bits)


@dataclass(frozen=True)
class LinearLevels(Levels):
    """Integers from −limit to limit times a scale `(O,)`, fp32 rounded to fp16."""

    problem: Problem
    scale: Matrix
    bits: int

    @property
    def limit(self) -> int:
        return int(2 ** (self.bits - 1) - 1)

    @property
    def integers(self) -> Matrix:
        return np.arange(-self.limit, self.limit + 1, dtype=np.float32)

    @property
    def rows(self) -> Matrix:
        return self.integers * self.scale.astype(np.float16).astype(np.float32)[:, None]

    def fitted(
        self, problem: Problem, indices: Indices, gradients: Matrix
    ) -> "tuple[LinearLevels, Indices]":
        chosen = self.integers[indices]
        weighted = chosen @ problem.hessian
        squares = (weighted * chosen).sum(1)
        scale = (weighted * problem.weight).sum(1) / np.where(squares > 0, squares, 1)
        return LinearLevels(problem, np.where(scale > 0, scale, self.scale), self.bits), indices

    def encoded(self, indices: Indices, shape: Shape) -> Affine:
        own = indices[:, self.problem.back].astype(np.int16) - self.limit
        scale = self.scale.astype(np.float16).reshape(-1, *[1] * (len(shape) - 1))
        return Affine(own.astype(np.int8).reshape(shape), scale, self.bits)
