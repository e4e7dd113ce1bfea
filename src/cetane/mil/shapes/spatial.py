"""Shape rules of ops on images: convolutions, pools, resizing, boxes."""

import math

from cetane.mil.shapes.rules import KnownOp, Shape, Shapes, Unknown, bounded, rule
from cetane.validation import MOST_ELEMENTS


@rule("conv")
def _conv(given: KnownOp) -> Shapes:
    x, weight, groups = given.shape("x"), given.shape("weight"), given.value("groups", 1)
    if len(x) < 3 or len(weight) != len(x):
        raise ValueError(f"{x} and a weight of {weight} make no convolution")
    if groups < 1 or weight[1] * groups != x[1] or weight[0] % groups:
        raise ValueError(f"a weight of {weight} in {groups} groups does not fit {x}")
    if "bias" in given.op.inputs and given.shape("bias") != (weight[0],):
        raise ValueError(f"a bias of {given.shape('bias')} does not fit a weight of {weight}")
    return [(x[0], weight[0], *_windows(given, x, weight[2:]))]


@rule("conv_transpose")
def _conv_transpose(given: KnownOp) -> Shapes:
    x, weight, groups = given.shape("x"), given.shape("weight"), given.value("groups", 1)
    rank = len(x) - 2
    strides = given.value("strides") or [1] * rank
    dilations = given.value("dilations") or [1] * rank
    if len(weight) != len(x) or len(strides) != rank or len(dilations) != rank or groups < 1:
        raise ValueError(f"{x} and a weight of {weight} make no convolution")
    reached = [
        (size - 1) * stride + (taps - 1) * dilation + 1
        for size, stride, taps, dilation in zip(x[2:], strides, weight[2:], dilations, strict=True)
    ]
    bounded((x[0], weight[1] * groups, *reached))
    if given.value("output_shape") is not None:
        bounded(given.values("output_shape"))
    if given.value("pad") is not None:
        bounded([x[0], weight[1] * groups, *(r + max(map(abs, given.values("pad")))
                                             for r in reached)])  # fmt: skip
    return None


@rule("max_pool", "avg_pool", "l2_pool")
def _pool(given: KnownOp) -> Shapes:
    kernel = tuple(given.values("kernel_sizes"))
    sizes = _windows(given, given.shape(), kernel)
    bounded((*given.shape()[:2], *(size + 1 for size in sizes)))
    return None


def _windows(given: KnownOp, x: Shape, kernel: Shape) -> list[int]:
    """The sizes of the axes along which windows move. Bounds the padded tensor on the way."""
    rank = len(x) - 2
    if not 1 <= rank <= 3 or len(kernel) != rank or any(taps < 1 for taps in kernel):
        raise ValueError(f"windows of {kernel} do not fit {x}")
    strides = given.value("strides") or [1] * rank
    dilations = given.value("dilations") or [1] * rank
    custom = str(given.value("pad_type", "valid")).lower() == "custom"
    pad = (given.value("pad") if custom else None) or [0] * 2 * rank
    if len(strides) != rank or len(dilations) != rank or len(pad) != 2 * rank:
        raise ValueError(f"strides, dilations or pad are not those of {rank} axes")
    if min(*strides, *dilations) < 1 or max(*strides, *dilations) > MOST_ELEMENTS:
        raise ValueError("a stride or a dilation is no positive number")
    same = str(given.value("pad_type", "valid")).lower().startswith("same")
    sizes, padded = [], []
    for axis, size in enumerate(x[2:]):
        reach = (kernel[axis] - 1) * dilations[axis] + 1
        if same:
            count = -(-size // strides[axis])
            padded.append(max(size, (count - 1) * strides[axis] + reach))
        else:
            padded.append(size + pad[2 * axis] + pad[2 * axis + 1])
            count = (padded[-1] - reach) // strides[axis] + 1
        if count < 1 or min(pad) < 0:
            raise ValueError(f"windows of {kernel} do not fit {x}")
        sizes.append(count)
    bounded((*x[:2], *padded))
    return sizes


@rule(
    "upsample_nearest_neighbor", "upsample_bilinear", "resize_nearest_neighbor", "resize_bilinear",
    "resize", "crop_resize", "affine",
)  # fmt: skip
def _resized(given: KnownOp) -> Shapes:
    x = given.shape()
    if len(x) < 2:
        raise ValueError("an image has two axes")
    height, width = x[-2:]
    scales = [given.value(f"scale_factor_{side}", 1) for side in ("height", "width")]
    targets = [
        max(given.value(f"{what}_{side}", 1) for what in ("target", "target_size", "output"))
        for side in ("height", "width")
    ]
    sizes = [math.ceil(height * scales[0]) + targets[0], math.ceil(width * scales[1]) + targets[1]]
    bounded((*x[:-2], *sizes))
    if "shape" in given.op.inputs:
        bounded([*x, *given.values("shape")])
    return None


@rule("resample")
def _resample(given: KnownOp) -> Shapes:
    x, coordinates = given.shape(), given.shape("coordinates")
    return [(x[0], x[1], *coordinates[1:3])]


@rule("crop")
def _crop(given: KnownOp) -> Shapes:
    *outer, height, width = given.shape()
    edges = given.values("crop_height"), given.values("crop_width")
    if any(edge < 0 for pair in edges for edge in pair):
        raise ValueError("a crop is negative")
    return [(*outer, height - sum(edges[0]), width - sum(edges[1]))]


@rule("space_to_batch")
def _space_to_batch(given: KnownOp) -> Shapes:
    n, c, *sizes = given.shape()
    blocks, pads = given.values("block_shape"), given.value("paddings")
    padded = [size + sum(pair) for size, pair in zip(sizes, pads, strict=True)]
    if any(block < 1 or size % block for size, block in zip(padded, blocks, strict=True)):
        raise ValueError(f"blocks of {blocks} do not divide {padded}")
    bounded((n, c, *padded))
    inner = (size // block for size, block in zip(padded, blocks, strict=True))
    return [(n * math.prod(blocks), c, *inner)]


@rule("batch_to_space")
def _batch_to_space(given: KnownOp) -> Shapes:
    n, c, *sizes = given.shape()
    blocks, crops = given.values("block_shape"), given.value("crops")
    if any(block < 1 for block in blocks) or n % math.prod(blocks):
        raise ValueError(f"a batch of {n} is no number of blocks of {blocks}")
    if any(edge < 0 for pair in crops for edge in pair):
        raise ValueError("a crop is negative")
    whole = zip(sizes, blocks, crops, strict=True)
    inner = (size * block - sum(pair) for size, block, pair in whole)
    return [(n // math.prod(blocks), c, *inner)]


@rule("non_maximum_suppression")
def _suppressed(given: KnownOp) -> Shapes:
    """The shapes differ between iOS versions, so they stay unknown. The op compares all pairs of
    boxes."""
    boxes = given.shape("boxes")
    bounded((max(boxes[1:]), max(boxes[1:])))
    bounded((boxes[0], given.value("max_boxes"), max(given.shape("scores")[1:])))
    raise Unknown
