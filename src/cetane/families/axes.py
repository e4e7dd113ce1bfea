"""Where a hidden tensor has its tokens: the one place that knows a recipe's `tensor_layout`.

Hidden tensors are `(1, C, 1, T)`, `c1t`, channels second as the Neural Engine stores them. The
published ports have `(1, C, T, 1)`, `ct1`, which is kept to reproduce them. Both have the same
memory order, so views that end in T serve both; the modules below ask for what differs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from cetane.schema.interface import Order, hidden_shape, time_axis

_order: ContextVar[Order] = ContextVar("order", default="c1t")


@contextmanager
def tensor_layout(order: Order) -> Iterator[None]:
    """Modules that are made inside have hidden tensors of this layout."""
    token = _order.set(order)
    try:
        yield
    finally:
        _order.reset(token)


@dataclass(frozen=True)
class Axes:
    """The layout of hidden tensors, that of the surrounding `tensor_layout`."""

    order: Order = field(default_factory=_order.get)

    @property
    def time(self) -> int:
        """The axis of the tokens."""
        return time_axis(self.order)

    def shape(self, channels: int, tokens: int) -> tuple[int, int, int, int]:
        """Of a hidden tensor."""
        return hidden_shape(self.order, channels, tokens)

    def kernel(self, taps: int) -> tuple[int, int]:
        """Of a convolution over time."""
        return (1, taps) if self.order == "c1t" else (taps, 1)
