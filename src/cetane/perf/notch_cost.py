"""The cost of weights on the 1 MiB notch (`cetane.hardware.notch`).

It is not a part of the fitted model: the evidence shows no such slowness for 4- and 8-bit weights
of these shapes (docs/explanation/cost-model.md).
"""

from collections.abc import Iterable
from math import prod

from cetane.hardware.chips import Chip
from cetane.hardware.notch import on_notch
from cetane.perf.cost import Rates

Shape = tuple[int, ...]


def hit_bytes(shapes: Iterable[Shape], bits: int) -> float:
    """Bytes of the weights `(O, I, ...)` that are on the notch."""
    return sum(prod(s) * bits / 8 for s in shapes if on_notch(s[0], prod(s[1:]), bits))


def cost(shapes: Iterable[Shape], chip: Chip, rates: Rates) -> float:
    """The additional milliseconds for fp16 weights of these shapes, if all are read."""
    slow = 1e-6 / chip.figure("notch").value
    return hit_bytes(shapes, 16) * max(0.0, slow - rates["half"].ms)
