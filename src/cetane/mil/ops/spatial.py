"""Windows of images: pooling, and moves of elements between space and channels or batch."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from cetane.mil.ops.linear import implied_padding, last_first
from cetane.mil.ops.registry import op

Sizes = list[int] | None


@op("max_pool")
def max_pool(
    x: Tensor,
    kernel_sizes: list[int],
    pad_type: str,
    strides: Sizes = None,
    pad: Sizes = None,
    ceil_mode: bool = False,
) -> Tensor:
    lowest = -math.inf
    windows = _windows(x, kernel_sizes, pad_type, strides, pad, ceil_mode, lowest, lowest)
    return windows.amax(_trailing(kernel_sizes))


@op("avg_pool")
def avg_pool(
    x: Tensor,
    kernel_sizes: list[int],
    pad_type: str,
    strides: Sizes = None,
    pad: Sizes = None,
    exclude_padding_from_average: bool = False,
    ceil_mode: bool = False,
) -> Tensor:
    """The mean counts the padding, unless that is excluded. It never counts the elements that
    `ceil_mode` adds beyond the padding."""
    how = kernel_sizes, pad_type, strides, pad, ceil_mode
    padding_counts = 0.0 if exclude_padding_from_average else 1.0
    counted = _windows(torch.ones(1, 1, *x.shape[2:]), *how, padding_counts)
    dims = _trailing(kernel_sizes)
    return _windows(x, *how).sum(dims) / counted.sum(dims)


@op("l2_pool")
def l2_pool(
    x: Tensor,
    kernel_sizes: list[int],
    pad_type: str,
    strides: Sizes = None,
    pad: Sizes = None,
    ceil_mode: bool = False,
) -> Tensor:
    windows = _windows(x.square(), kernel_sizes, pad_type, strides, pad, ceil_mode)
    return windows.sum(_trailing(kernel_sizes)).sqrt()


def _windows(
    x: Tensor,
    kernel: list[int],
    pad_type: str,
    strides: Sizes,
    pad: Sizes,
    ceil_mode: bool,
    padding: float = 0.0,
    beyond: float = 0.0,
) -> Tensor:
    """A view of all windows; their axes come last.

    `padding` is the value of the padding. `beyond` is the value that `ceil_mode` adds after it, to
    complete a last window. A window that starts in the padding after the image is left out.
    """
    strides = strides or [1] * len(kernel)
    if pad_type.lower() == "custom":
        edges = pad or [0] * 2 * len(kernel)
    else:
        edges = implied_padding(pad_type, x.shape[2:], kernel, strides, [1] * len(kernel))
    x = functional.pad(x, last_first(edges), value=padding)
    if ceil_mode:
        added = []
        for axis, (size, taps, stride) in enumerate(zip(x.shape[2:], kernel, strides, strict=True)):
            before, after = edges[2 * axis : 2 * axis + 2]
            count = math.ceil((size - taps) / stride) + 1
            if before + after and (count - 1) * stride >= size - after:
                count -= 1
            added += [0, max(0, (count - 1) * stride + taps - size)]
        x = functional.pad(x, last_first(added), value=beyond)
    for axis, (taps, stride) in enumerate(zip(kernel, strides, strict=True), start=2):
        x = x.unfold(axis, taps, stride)
    return x


def _trailing(kernel: list[int]) -> list[int]:
    return list(range(-len(kernel), 0))


@op("pixel_shuffle")
def pixel_shuffle(x: Tensor, upscale_factor: int) -> Tensor:
    return functional.pixel_shuffle(x, upscale_factor)


@op("pixel_unshuffle")
def pixel_unshuffle(x: Tensor, downscale_factor: int) -> Tensor:
    return functional.pixel_unshuffle(x, downscale_factor)


@op("depth_to_space")
def depth_to_space(x: Tensor, block_size: int) -> Tensor:
    """Unlike in `pixel_shuffle`, the block is the outer part of the channels."""
    n, c, h, w = x.shape
    blocks = x.reshape(n, block_size, block_size, c // block_size**2, h, w)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(n, -1, h * block_size, w * block_size)


@op("space_to_depth")
def space_to_depth(x: Tensor, block_size: int) -> Tensor:
    n, c, h, w = x.shape
    rows, columns = h // block_size, w // block_size
    blocks = x.reshape(n, c, rows, block_size, columns, block_size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(n, c * block_size**2, rows, columns)


@op("space_to_batch")
def space_to_batch(x: Tensor, block_shape: list[int], paddings: list[list[int]]) -> Tensor:
    x = functional.pad(x, last_first([edge for pair in paddings for edge in pair]))
    n, c, h, w = x.shape
    down, across = block_shape
    blocks = x.reshape(n, c, h // down, down, w // across, across)
    return blocks.permute(3, 5, 0, 1, 2, 4).reshape(-1, c, h // down, w // across)


@op("batch_to_space")
def batch_to_space(x: Tensor, block_shape: list[int], crops: list[list[int]]) -> Tensor:
    _, c, h, w = x.shape
    down, across = block_shape
    blocks = x.reshape(down, across, -1, c, h, w)
    whole = blocks.permute(2, 3, 4, 0, 5, 1).reshape(-1, c, h * down, w * across)
    return functional.pad(whole, last_first([-edge for pair in crops for edge in pair]))


@op("crop")
def crop(x: Tensor, crop_height: list[int], crop_width: list[int]) -> Tensor:
    return functional.pad(x, last_first([-edge for edge in (*crop_height, *crop_width)]))
