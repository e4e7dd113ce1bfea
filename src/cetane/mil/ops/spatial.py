"""Windows of images: pooling, and moving elements between space and channels or batch."""

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
    edges, strides, beyond = _window_edges(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = functional.pad(x, last_first(_sum_edges(edges, beyond)), value=-math.inf)
    return _windows(padded, kernel_sizes, strides).amax(_trailing(kernel_sizes))


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
    """What `ceil_mode` adds beyond the padding never counts, the padding only if it is not
    excluded."""
    edges, strides, beyond = _window_edges(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    counted = torch.ones(1, 1, *x.shape[2:])
    counted = functional.pad(
        counted, last_first(edges), value=0.0 if exclude_padding_from_average else 1.0
    )
    counted = functional.pad(counted, last_first(beyond))
    padded = functional.pad(x, last_first(_sum_edges(edges, beyond)))
    dims = _trailing(kernel_sizes)
    total = _windows(padded, kernel_sizes, strides).sum(dims)
    return total / _windows(counted, kernel_sizes, strides).sum(dims)


@op("l2_pool")
def l2_pool(
    x: Tensor,
    kernel_sizes: list[int],
    pad_type: str,
    strides: Sizes = None,
    pad: Sizes = None,
    ceil_mode: bool = False,
) -> Tensor:
    edges, strides, beyond = _window_edges(x, kernel_sizes, strides, pad_type, pad, ceil_mode)
    padded = functional.pad(x.square(), last_first(_sum_edges(edges, beyond)))
    return _windows(padded, kernel_sizes, strides).sum(_trailing(kernel_sizes)).sqrt()


def _window_edges(
    x: Tensor, kernel: list[int], strides: Sizes, pad_type: str, pad: Sizes, ceil_mode: bool
) -> tuple[list[int], list[int], list[int]]:
    """The padding, the strides, and what `ceil_mode` adds to the padding so that a last window
    that is not complete fits. A window that starts in the padding behind is left out."""
    strides = strides or [1] * len(kernel)
    if pad_type.lower() == "custom":
        edges = pad or [0] * 2 * len(kernel)
    else:
        dilations = [1] * len(kernel)
        edges = implied_padding(pad_type, x.shape[2:], kernel, strides, dilations)
    beyond = [0] * len(edges)
    if ceil_mode:
        for axis, (size, taps, stride) in enumerate(zip(x.shape[2:], kernel, strides, strict=True)):
            before, after = edges[2 * axis : 2 * axis + 2]
            count = math.ceil((size + before + after - taps) / stride) + 1
            if before + after and (count - 1) * stride >= size + before:
                count -= 1
            beyond[2 * axis + 1] = max(0, (count - 1) * stride + taps - size - before - after)
    return edges, strides, beyond


def _sum_edges(one: list[int], other: list[int]) -> list[int]:
    return [a + b for a, b in zip(one, other, strict=True)]


def _windows(x: Tensor, kernel: list[int], strides: list[int]) -> Tensor:
    """A view with one axis per axis of the windows at the end."""
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
    """Unlike `pixel_shuffle`, the block is the outer part of the channels."""
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
