"""Products: linear layers, matrices, convolutions, attention."""

from __future__ import annotations

from cetane.mil.fast.context import ATTENTION, PACKED_LINEAR
from cetane.mil.fast.emit import BLOCK
from cetane.mil.fast.tape.code import Binary, Opcode, Unary
from cetane.mil.fast.tape.ops.elementwise import combined
from cetane.mil.fast.tape.ops.registry import Places, enters
from cetane.mil.fast.tape.ops.shape import part, transpose
from cetane.mil.fast.tape.place import Place
from cetane.mil.fast.tape.unsupported import Unsupported
from cetane.mil.fast.tape.writer import Writer
from cetane.mil.program import Argument
from cetane.mil.shapes import broadcast


@enters(PACKED_LINEAR)
def packed_linear(w: Writer, x: Place, weight: Argument, bias: Place | None = None) -> Place:
    """The product of rows `x (1, T, K)` with a constant weight (N, K, ...): (1, T, N)."""
    stored = w.store.rows(w.constants, weight)
    shape = w.constants.type(weight).static_shape
    assert shape is not None
    _, tokens, columns = x.shape
    whole = -(-columns // BLOCK) * BLOCK
    if (x.strides[2] != 1 and columns > 1) or columns != whole:
        filled = w.new((1, tokens, whole))
        if columns != whole:
            w.emit(Opcode.UNARY, filled, filled, kind=Unary.FILL, numbers=(0.0,))
        x = w.copy(x, part(filled, 2, 0, columns))
    wide = w.new((1, tokens, stored.count))
    parameters = (
        tokens, whole, stored.count, stored.count, x.strides[1] if tokens > 1 else whole,
        stored.row_bytes, stored.data, stored.scale, stored.tables, stored.palette_ids,
    )  # fmt: skip
    w.emit(Opcode.PRODUCT, wide, x, kind=stored.form, parameters=parameters, shared=True)
    result = part(wide, 2, 0, shape[0])
    return result if bias is None else combined(w, result, bias, Binary.ADD)


@enters("matmul")
def matmul(
    w: Writer, x: Place, y: Place, transpose_x: bool = False, transpose_y: bool = False
) -> Place:
    """Products of matrices, of up to two axes of batches."""
    if len(x.shape) < 2 or len(y.shape) < 2:
        raise Unsupported("a product with a vector")
    x, y = (_transposed(w, a) if flag else a for a, flag in ((x, transpose_x), (y, transpose_y)))
    (*batch_x, rows, inner), (*batch_y, _, columns) = x.shape, y.shape
    batch = broadcast(tuple(batch_x), tuple(batch_y))
    sizes = [size for size in batch if size != 1]
    if len(sizes) > 2:
        raise Unsupported("a product of more than two axes of matrices")
    result = w.new((*batch, rows, columns))
    wide = [a.broadcast((*batch, *a.shape[-2:])) for a in (x, y)] + [result]
    strides = [
        [0] * (2 - len(sizes))
        + [stride for stride, size in zip(a.strides, batch, strict=False) if size != 1]
        + list(a.strides[-2:])
        for a in wide
    ]
    parameters = [*[1] * (2 - len(sizes)), *sizes, rows, inner, columns]
    parameters += [stride for own in strides for stride in own]
    large = result.size * inner >= 1 << 16
    return w.emit(Opcode.MATMUL, result, x, y, parameters=parameters, shared=large)


def _transposed(w: Writer, x: Place) -> Place:
    rank = len(x.shape)
    return transpose(w, x, [*range(rank - 2), rank - 1, rank - 2])


@enters("conv")
def conv(
    w: Writer,
    x: Place,
    weight: Place,
    bias: Place | None = None,
    strides: list[int] | None = None,
    pad_type: str = "valid",
    pad: list[int] | None = None,
    dilations: list[int] | None = None,
    groups: int = 1,
) -> Place:
    """A convolution along the last axis of `(1, C, L)` or `(1, C, 1, L)`."""
    axes = len(x.shape) - 2
    if x.shape[0] != 1 or any(size != 1 for size in (*x.shape[2:-1], *weight.shape[2:-1])):
        raise Unsupported("a convolution over several axes")
    edges = pad if pad and pad_type == "custom" else [0] * 2 * axes
    if pad_type not in ("valid", "custom") or any(edges[:-2]):
        raise Unsupported(f"a convolution with padding {pad_type}")
    stride, dilation = (given[-1] if given else 1 for given in (strides, dilations))
    channels, inputs, taps = weight.shape[0], weight.shape[1], weight.shape[-1]
    if inputs * groups != x.shape[1] or channels % groups:
        raise Unsupported("a convolution of other channels")
    length = x.shape[-1]
    count = (length + sum(edges[-2:]) - (taps - 1) * dilation - 1) // stride + 1
    result = w.new((1, channels, *[1] * (axes - 1), count))
    given = w.number(0.0, (channels,)) if bias is None else w.contiguous(bias)
    parameters = (
        channels // groups, inputs, groups, taps, length, count, stride, dilation, edges[-2],
        x.strides[1], x.strides[-1], result.strides[1], result.strides[-1],
    )  # fmt: skip
    large = result.size * inputs * taps >= 1 << 16
    return w.emit(
        Opcode.CONV, result, x, w.contiguous(weight), given, parameters=parameters, shared=large
    )


@enters(ATTENTION)
def attention(
    w: Writer,
    rows: Place,
    keys: Places,
    values: Places,
    mask: Place,
    cap: float,
    exact: int,
    sinks: Place | None = None,
) -> Place:
    """`attention_stage.AttentionStage` tells what it computes."""
    _, heads, count, width = rows.shape
    out = values[0].shape[2]
    past, new = keys[0].shape[3], keys[1].shape[3] if len(keys) > 1 else 0
    mask = w.contiguous(mask)
    if mask.shape[3] != past + new:
        raise Unsupported("a mask that is repeated along keys")
    rows = w.contiguous(rows)
    parts = [w.contiguous(place) for given in (keys, values) for place in given]
    if not new:
        parts = [parts[0], parts[0], parts[1], parts[1]]
    runs = w.runs(mask, past, new)
    seen = rows if sinks is None else w.contiguous(sinks.broadcast((1, heads, count, 1)))
    result = w.new((1, heads, count, out))
    parameters = (
        heads, count, width, out, past, new, mask.shape[1], mask.shape[2], runs,
        int(sinks is not None),
    )  # fmt: skip
    return w.emit(
        Opcode.ATTEND, result, rows, mask, seen, kind=exact, parameters=parameters,
        numbers=(cap,), shared=True, unstrided=parts,
    )  # fmt: skip
