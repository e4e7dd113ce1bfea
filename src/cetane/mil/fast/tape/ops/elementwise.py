"""Ops that compute element by element."""

from __future__ import annotations

from cetane.mil.fast.context import WIDENED
from cetane.mil.fast.tape.code import Binary, Opcode, Unary
from cetane.mil.fast.tape.ops.registry import enters
from cetane.mil.fast.tape.place import Place
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.tape.writer import Writer
from cetane.mil.shapes import broadcast

_UNARY = {
    "silu": Unary.SILU, "sigmoid": Unary.SIGMOID, "tanh": Unary.TANH, "exp": Unary.EXP,
    "relu": Unary.RELU, "softplus": Unary.SOFTPLUS, "sqrt": Unary.SQRT, "square": Unary.SQUARE,
    "abs": Unary.ABS, "round": Unary.ROUND,
}  # fmt: skip
_WITH_EPSILON = {"rsqrt": Unary.RSQRT, "log": Unary.LOG, "inverse": Unary.INVERSE}
_BINARY = {
    "add": Binary.ADD, "sub": Binary.SUB, "mul": Binary.MUL, "real_div": Binary.DIV,
    "maximum": Binary.MAXIMUM, "minimum": Binary.MINIMUM, "equal": Binary.EQUAL,
    "not_equal": Binary.NOT_EQUAL, "greater": Binary.GREATER,
    "greater_equal": Binary.GREATER_EQUAL, "less": Binary.LESS, "less_equal": Binary.LESS_EQUAL,
    "logical_and": Binary.MUL, "logical_or": Binary.MAXIMUM,
}  # fmt: skip
_GELU = {
    "EXACT": Unary.GELU, "TANH_APPROXIMATION": Unary.GELU_TANH,
    "SIGMOID_APPROXIMATION": Unary.GELU_SIGMOID,
}  # fmt: skip


def _unary(kind: str, number: Unary) -> None:
    @enters(kind)
    def instruction(w: Writer, x: Place) -> Place:
        return transformed(w, x, number)


def _with_epsilon(kind: str, number: Unary, usual: float) -> None:
    @enters(kind)
    def instruction(w: Writer, x: Place, epsilon: float = usual) -> Place:
        return transformed(w, x, number, epsilon)


def _binary(kind: str, number: Binary) -> None:
    @enters(kind)
    def instruction(w: Writer, x: Place, y: Place) -> Place:
        return combined(w, x, y, number)


for _kind, _number in _UNARY.items():
    _unary(_kind, _number)
for _kind, _epsilon_number in _WITH_EPSILON.items():
    _with_epsilon(_kind, _epsilon_number, {"rsqrt": 1e-12, "inverse": 1e-4}.get(_kind, 1e-45))
for _kind, _binary_number in _BINARY.items():
    _binary(_kind, _binary_number)


@enters("gelu")
def gelu(w: Writer, x: Place, mode: str = "EXACT") -> Place:
    return transformed(w, x, _GELU[mode])


@enters("clip")
def clip(w: Writer, x: Place, alpha: float, beta: float) -> Place:
    return transformed(w, x, Unary.CLIP, alpha, beta)


@enters("cast")
def cast(w: Writer, x: Place, dtype: str) -> Place:
    """Numbers of a tape are float32: integers below 2**24 are exact."""
    if dtype not in ("fp16", "fp32"):
        raise Unsupported(f"a cast to {dtype}")
    return widened(w, x, w.number(1.0, (*x.shape[:2], 1, x.shape[-1]))) if x.narrow else x


@enters(WIDENED)
def widened(w: Writer, x: Place, scales: Place, mask: Place | None = None) -> Place:
    """Whole numbers of 8 bits `(1, H, D, S)` times scales `(1, H, 1, S)`, in the slots that the
    mask shows; in all of them without a mask. Hidden slots hold anything."""
    if not x.narrow or len(x.shape) != 4 or x.shape[0] != 1 or not x.contiguous:
        raise Unsupported("scales of other numbers")
    _, heads, width, slots = x.shape
    scales = scales.broadcast((1, heads, 1, slots))
    runs = -1
    if mask is not None:
        mask = w.contiguous(mask)
        runs = w.runs(mask, slots, mask.shape[3] - slots)
    parameters = (heads, width, slots, runs)
    return w.emit(
        Opcode.WIDEN, w.new(x.shape), x, w.contiguous(scales), parameters=parameters, shared=True
    )


@enters("select")
def select(w: Writer, cond: Place, a: Place, b: Place) -> Place:
    shape = broadcast(cond.shape, a.shape, b.shape)
    operands = [place.broadcast(shape) for place in (cond, a, b)]
    return w.emit(Opcode.SELECT, w.new(shape), *operands)


def transformed(w: Writer, x: Place, kind: Unary, *numbers: float) -> Place:
    """A function of each element, in the order in which they lie."""
    return w.emit(Opcode.UNARY, w.new(x.shape, x), x, kind=kind, numbers=numbers)


def combined(w: Writer, x: Place, y: Place, kind: Binary) -> Place:
    shape = broadcast(x.shape, y.shape)
    whole = [place for place in (x, y) if place.shape == shape and shape]
    like = min(whole, key=lambda place: place.strides[-1], default=None)

    def made() -> Place:
        operands = [
            w.along(place, like) if like and 1 < place.size < like.size else place
            for place in (x, y)
        ]
        wide = [place.broadcast(shape) for place in operands]
        return w.emit(Opcode.BINARY, w.new(shape, like), *wide, kind=kind)

    return w.once(("combined", x, y, kind), [x, y], made)
