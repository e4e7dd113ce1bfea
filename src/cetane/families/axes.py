"""The axes of hidden tensors. Only this module knows a recipe's `tensor_layout`.

`c1t` is `(1, C, 1, T)`, as the Neural Engine stores tensors. `ct1` is `(1, C, T, 1)`; it is kept to
reproduce the published ports. Both have the same order in memory, so views that end in T fit both.
Other modules ask `Axes` for the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from cetane.schema.interface import Order, hidden_shape, time_axis

_order: ContextVar[Order] = ContextVar("order", default="c1t")


@contextmanager
def tensor_layout(order: Order) -> Iterator[None]:
    """A context: modules made inside it have hidden tensors of this layout."""
    token = _order.set(order)
    try:
        yield
    finally:
        _order.reset(token)


@dataclass(frozen=True)
class Axes:
    """The axes of hidden tensors, in the layout of the surrounding `tensor_layout`."""

    order: Order = field(default_factory=_order.get)

    @property
    def time(self) -> int:
        """The axis of the tokens."""
        return time_axis(self.order)

    def shape(self, channels: int, tokens: int) -> tuple[int, int, int, int]:
        """The shape of a hidden tensor."""
        return hidden_shape(self.order, channels, tokens)

    def kernel(self, taps: int) -> tuple[int, int]:
        """The kernel shape of a convolution over time."""
        return (1, taps) if self.order == "c1t" else (taps, 1)
