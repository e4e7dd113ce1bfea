"""Ops that read all elements along an axis: reductions, softmax, norms."""

from __future__ import annotations

import math

from cetane.mil.fast.context import RMS_NORM
from cetane.mil.fast.tape.code import Opcode, Reduction
from cetane.mil.fast.tape.ops.registry import enters
from cetane.mil.fast.tape.ops.shape import reshaped, transpose
from cetane.mil.fast.tape.place import Place
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.tape.writer import SHARED, Writer

_REDUCTIONS = {
    "reduce_sum": Reduction.SUM, "reduce_mean": Reduction.MEAN, "reduce_max": Reduction.MAX,
    "reduce_min": Reduction.MIN,
}  # fmt: skip


@enters(RMS_NORM)
def rms_norm(
    w: Writer, x: Place, axes: list[int], epsilon: float, gamma: Place | None = None
) -> Place:
    """x divided by the root of the mean square of a line, times gamma."""
    if len(axes) != 1:
        raise Unsupported("a norm over several axes")
    count = x.shape[axes[0]]
    factor = w.number(1.0, (count,)) if gamma is None else reshaped(w, gamma, (count,))
    last = axes[0] % len(x.shape) == len(x.shape) - 1
    result = w.new(x.shape, None if last else x)
    return _along(w, Opcode.NORM, x, result, axes[0], w.contiguous(factor), numbers=(epsilon,))


@enters("softmax")
def softmax(w: Writer, x: Place, axis: int = -1) -> Place:
    return _along(w, Opcode.SOFTMAX, x, w.new(x.shape, x), axis)


def _reduction(kind: str, number: Reduction) -> None:
    @enters(kind)
    def instruction(
        w: Writer, x: Place, axes: list[int] | None = None, keep_dims: bool = False
    ) -> Place:
        rank = len(x.shape)
        gone = sorted({axis % rank for axis in (range(rank) if axes is None else axes)})
        kept = [axis for axis in range(rank) if axis not in gone]
        moved = transpose(w, x, [*kept, *gone])
        lines = reshaped(w, moved, [*(x.shape[axis] for axis in kept), -1 if not gone else
                                    math.prod(x.shape[axis] for axis in gone)])  # fmt: skip
        result = w.new((*lines.shape[:-1], 1))
        _along(w, Opcode.REDUCE, lines, result, -1, kind=number)
        shape = [1 if axis in gone else x.shape[axis] for axis in range(rank)]
        return reshaped(w, result, shape if keep_dims else [x.shape[axis] for axis in kept])


for _kind, _reduction_number in _REDUCTIONS.items():
    _reduction(_kind, _reduction_number)


def _along(
    w: Writer, opcode: Opcode, x: Place, result: Place, axis: int, *operands: Place, kind: int = 0,
    numbers: tuple[float, ...] = (),
) -> Place:  # fmt: skip
    """An instruction on lines along an axis."""
    axis %= len(x.shape)
    others = [a for a in range(len(x.shape)) if a != axis and x.shape[a] != 1]
    others.sort(key=lambda a: -x.strides[a])
    if len(others) > 3:
        raise Unsupported("lines over more than three axes")
    missing = [0] * (3 - len(others))
    parameters = [
        *(1 for _ in missing), *(x.shape[a] for a in others),
        x.shape[axis], x.strides[axis], result.strides[axis],
        *missing, *(x.strides[a] for a in others),
        *missing, *(result.strides[a] for a in others),
    ]  # fmt: skip
    large = x.size >= SHARED
    return w.emit(
        opcode,
        result,
        x,
        *operands,
        kind=kind,
        parameters=parameters,
        numbers=numbers,
        shared=large,
    )
