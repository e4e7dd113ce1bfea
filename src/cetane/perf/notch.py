"""Weights that an ANE takes slowly: those whose share for each of 16 cores is a multiple of 1 MiB.

Found by Eileen Yoon (eiln.github.io/posts/ane-dma.html) and measured for fp16 on an M4, as quoted
in kasper0406/stablehlo-coreml #110. It is no part of the fitted model: of 4- and 8-bit weights of
these shapes, the evidence shows no such slowness (docs/performance.md).
"""

from collections.abc import Iterable
from math import ceil, prod

from cetane.perf.chips import Chip
from cetane.perf.cost import Rates

CORES = 16
STEP = 2**20
TOLERANCE = 16 * 2**10
Shape = tuple[int, ...]


def payload(shape: Shape, bits: float) -> float:
    """Bytes of a weight `(O, I, ...)` that one core gets."""
    return ceil(shape[0] / CORES) * prod(shape[1:]) * bits / 8


def is_hit(shape: Shape, bits: float) -> bool:
    """Whether a core's share is a multiple of 1 MiB, give or take 16 KiB."""
    size = payload(shape, bits)
    return size > STEP - TOLERANCE and abs(size - round(size / STEP) * STEP) <= TOLERANCE


def hit_bytes(shapes: Iterable[Shape], bits: float) -> float:
    """Bytes of the weights that are hit."""
    return sum(prod(shape) * bits / 8 for shape in shapes if is_hit(shape, bits))


def cost(shapes: Iterable[Shape], chip: Chip, rates: Rates) -> float:
    """Milliseconds that fp16 weights of these shapes take longer, if all of them are read."""
    slow = 1e-6 / chip.figure("notch").value
    return hit_bytes(shapes, 16) * max(0.0, slow - rates["half"].ms)
