"""Reading and writing rectangular parts of a tensor, and padding around one."""

import numpy as np
import torch
from torch import Tensor

from cetane.mil.ops.registry import op

Mask = list[bool] | None


@op("slice_by_index")
def slice_by_index(
    x: Tensor,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Tensor:
    slices, reversed_axes = _slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    squeezed = [axis for axis, squeeze in enumerate(squeeze_mask or []) if squeeze]
    return x[slices].flip(reversed_axes).squeeze(squeezed)


@op("slice_update")
def slice_update(
    x: Tensor,
    update: Tensor,
    begin: list[int],
    end: list[int],
    stride: list[int] | None = None,
    begin_mask: Mask = None,
    end_mask: Mask = None,
    squeeze_mask: Mask = None,
) -> Tensor:
    slices, reversed_axes = _slices(x, begin, end, stride, begin_mask, end_mask, squeeze_mask)
    result = x.clone()
    result[slices] = update.reshape(x[slices].shape).flip(reversed_axes)
    return result


def _slices(
    x: Tensor,
    begin: list[int],
    end: list[int],
    stride: list[int] | None,
    begin_mask: Mask,
    end_mask: Mask,
    squeeze_mask: Mask,
) -> tuple[tuple[slice, ...], list[int]]:
    """Slices with positive steps, and the axes to reverse afterwards: torch has no negative steps.

    A squeezed axis is a slice of one element.
    """
    slices, reversed_axes = [], []
    for axis, size in enumerate(x.shape):
        step = stride[axis] if stride else 1
        first = None if begin_mask and begin_mask[axis] else begin[axis]
        last = None if end_mask and end_mask[axis] else end[axis]
        if squeeze_mask and squeeze_mask[axis]:
            position = range(size)[first or 0]
            slices.append(slice(position, position + 1))
            continue
        positions = range(size)[first:last:step]
        if step < 0:
            positions = positions[::-1]
            reversed_axes.append(axis)
        slices.append(slice(positions.start, positions.stop, positions.step))
    return tuple(slices), reversed_axes


@op("slice_by_size")
def slice_by_size(x: Tensor, begin: list[int], size: list[int]) -> Tensor:
    """A size of -1 takes all elements up to the end."""
    for axis, (start, count) in enumerate(zip(begin, size, strict=True)):
        start += x.shape[axis] if start < 0 else 0
        x = x.narrow(axis, start, x.shape[axis] - start if count == -1 else count)
    return x


@op("pad")
def pad(x: Tensor, pad: list[int], mode: str = "constant", constant_val: float = 0.0) -> Tensor:
    """`pad` holds the padding before and after each of the last axes, in their order."""
    edges = list(zip(pad[::2], pad[1::2], strict=True))
    if mode == "constant":
        last_first = [edge for pair in reversed(edges) for edge in pair]
        return torch.nn.functional.pad(x, last_first, value=constant_val)
    numpy_mode = {"reflect": "reflect", "replicate": "edge"}[mode]
    for axis, pair in enumerate(edges, start=x.ndim - len(edges)):
        source = np.pad(np.arange(x.shape[axis]), pair, mode=numpy_mode)  # type: ignore[call-overload]
        x = x.index_select(axis, torch.from_numpy(source))
    return x
