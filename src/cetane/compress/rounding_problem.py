"""A weight that is to be rounded, and the quadratic form that the error of its output is."""

from functools import cached_property

import numpy as np
import numpy.typing as npt

from cetane.threads import over_rows

Matrix = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint8]

BLOCK = 128
"""Columns that are rounded before one product moves all columns behind them."""
ROWS = 64
"""Rows that are rounded before one product moves all rows below, if rows make up for each other.
A multiple of the rows that share an index."""


class RoundingProblem:
    """A weight `(O, I)` and the quadratic form that its errors are measured in.

    Columns are kept in the order of their rounding. With `by_size`, those with the largest diagonal
    come first: they count most, and most columns can still make up for them.

    `levels (O, K)` are the values that the weights of each row can become; they ascend.
    """

    def __init__(
        self,
        weight: Matrix,
        hessian: Matrix,
        outputs: Matrix | None = None,
        by_size: bool = True,
    ) -> None:
        diagonal = np.diagonal(hessian)
        self.order = np.argsort(-diagonal, kind="stable") if by_size else np.arange(len(diagonal))
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

    def rounded(self, levels: Matrix, indices: Indices) -> Matrix:
        """The values that indices name, `(O, I)`."""
        return np.take_along_axis(levels, indices, 1)

    def gradients(self, rounded: Matrix) -> Matrix:
        """Half the rate at which the error falls as each rounded value grows, `(O, I)`."""
        off = self.weight - rounded
        together = off if self.outputs is None else self.outputs @ off
        return np.asarray(together @ self.hessian, dtype=np.float32)

    def round(self, levels: Matrix) -> Indices:
        """The index of a level for every weight; later weights make up for each error."""
        moved = np.zeros_like(self.weight)
        indices = []
        for block in self.blocks:
            chosen, errors = self.round_columns(block, levels, moved[:, block].copy())
            indices.append(chosen)
            moved[:, block.stop :] -= errors @ self.factor[block, block.stop :]
        return np.concatenate(indices, 1)

    def round_columns(self, block: slice, levels: Matrix, moved: Matrix) -> tuple[Indices, Matrix]:
        """The indices of a block of columns, and their errors in units of `factor`'s diagonal.

        `moved` is how far the columns left of the block move the weights.
        """
        from cetane.compress import feedback  # here because numba takes a while to load

        factor = np.ascontiguousarray(self.factor[block, block])
        weight = self.weight[:, block].copy()
        chosen, errors = np.empty(moved.shape, np.uint8), np.empty_like(moved)
        if self.row_factor is None:
            over_rows(
                lambda *rows: feedback.round_block(*rows, factor),
                weight + moved, levels, chosen, errors,
            )  # fmt: skip
            return chosen, errors
        for rows, below in self.row_blocks:
            feedback.round_rows(
                weight[rows], moved[rows], levels[rows], chosen[rows], errors[rows],
                np.ascontiguousarray(self.row_factor[rows, rows]), factor,
            )  # fmt: skip
            weight[below] -= self.row_factor[rows, below].T @ weight[rows]
        return chosen, errors

    def descend(self, levels: Matrix, indices: Indices) -> Matrix:
        """Improve indices in place, column by column, once. Returns the gradients afterwards."""
        gradients = self.gradients(self.rounded(levels, indices))
        for block in self.blocks:
            chosen = np.ascontiguousarray(indices[:, block])
            changes = self.descend_columns(block, levels, gradients[:, block].copy(), chosen)
            if self.outputs is not None:
                changes = self.outputs @ changes
            indices[:, block] = chosen
            gradients -= changes @ self.hessian[block]
        return gradients

    def descend_columns(
        self, block: slice, levels: Matrix, gradients: Matrix, chosen: Indices
    ) -> Matrix:
        """Improve the `chosen` indices of a block of columns; returns how the values change.

        Changes `gradients` too.
        """
        from cetane.compress import feedback

        own, changes = np.ascontiguousarray(self.hessian[block, block]), np.empty_like(gradients)
        if self.outputs is None:
            over_rows(
                lambda *rows: feedback.descend_block(*rows, own), gradients, levels, chosen, changes
            )
            return changes
        for rows, below in self.row_blocks:
            together = np.ascontiguousarray(self.outputs[rows, rows])
            feedback.descend_rows(
                gradients[rows], levels[rows], chosen[rows], changes[rows], together, own
            )
            gradients[below] -= self.outputs[below, rows] @ (changes[rows] @ own)
        return changes

    def step_length(self, step: Matrix, gradients: Matrix) -> np.float32:
        """The factor of a step of all rounded values that lowers the error most."""
        other = step if self.outputs is None else self.outputs @ step
        falls = float(np.vdot(step, gradients))
        return np.float32(falls / max(float(np.vdot(step @ self.hessian, other)), 1e-30))


class VectorRoundingProblem(RoundingProblem):
    """A problem whose indices each stand for a vector: V neighbouring rows of one column.

    `levels (O / V, V, K)` are the palettes, for each vector of rows. An index is chosen for what
    the errors of all rows of its vector cost together.
    """

    def __init__(
        self,
        weight: Matrix,
        hessian: Matrix,
        outputs: Matrix | None,
        by_size: bool,
        length: int,
    ) -> None:
        """`length` is V, a divisor of `ROWS`."""
        super().__init__(weight, hessian, outputs, by_size)
        self.vector = length

    def rounded(self, levels: Matrix, indices: Indices) -> Matrix:
        vectors = np.take_along_axis(levels, indices[:, None], 2)
        return vectors.reshape(self.weight.shape)

    def block_of(self, rows: slice, factor: Matrix | None) -> Matrix:
        """The part of some rows of `outputs` or of its factor; rows that count alone have ones on
        the diagonal."""
        size = rows.stop - rows.start
        whole = np.eye(size, dtype=np.float32) if factor is None else factor[rows, rows]
        return np.ascontiguousarray(whole)

    @cached_property
    def round_views(self) -> Matrix:
        """What the errors of each vector are multiplied by, `(S, V, V)`. Their squares are then
        what they cost, if all rows below make up for them."""
        return np.linalg.inv(self.diagonal_blocks(self.row_factor).swapaxes(1, 2))

    @cached_property
    def descend_views(self) -> Matrix:
        """The same if no other row moves."""
        return np.linalg.cholesky(self.diagonal_blocks(self.outputs)).swapaxes(1, 2).copy()

    def diagonal_blocks(self, square: Matrix | None) -> Matrix:
        """The blocks `(S, V, V)` on the diagonal of a square matrix of all rows, as `block_of`."""
        count, length = len(self.weight) // self.vector, self.vector
        if square is None:
            return np.tile(np.eye(length, dtype=np.float32), (count, 1, 1))
        cut = square.reshape(count, length, count, length)
        return np.ascontiguousarray(np.moveaxis(np.diagonal(cut, axis1=0, axis2=2), -1, 0))

    def round_columns(self, block: slice, levels: Matrix, moved: Matrix) -> tuple[Indices, Matrix]:
        from cetane.compress import vectors as loops

        factor = np.ascontiguousarray(self.factor[block, block])
        weight, errors = self.weight[:, block].copy(), np.empty_like(moved)
        chosen = np.empty((len(levels), moved.shape[1]), np.uint8)
        for rows, below in self.row_blocks:
            own = self.vectors_of(rows)
            views = self.round_views[own]
            loops.round_rows(
                weight[rows], moved[rows], levels[own], views @ levels[own], chosen[own],
                errors[rows], self.block_of(rows, self.row_factor), views, factor,
            )  # fmt: skip
            if self.row_factor is not None:
                weight[below] -= self.row_factor[rows, below].T @ weight[rows]
        return chosen, errors

    def descend_columns(
        self, block: slice, levels: Matrix, gradients: Matrix, chosen: Indices
    ) -> Matrix:
        from cetane.compress import vectors as loops

        own, changes = np.ascontiguousarray(self.hessian[block, block]), np.empty_like(gradients)
        for rows, below in self.row_blocks:
            vectors = self.vectors_of(rows)
            views = self.descend_views[vectors]
            loops.descend_rows(
                gradients[rows], levels[vectors], views @ levels[vectors], chosen[vectors],
                changes[rows], self.block_of(rows, self.outputs), views, own,
            )  # fmt: skip
            if self.outputs is not None:
                gradients[below] -= self.outputs[below, rows] @ (changes[rows] @ own)
        return changes

    def vectors_of(self, rows: slice) -> slice:
        """The vectors that some rows make."""
        return slice(rows.start // self.vector, rows.stop // self.vector)


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
