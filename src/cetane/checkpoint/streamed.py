"""A checkpoint of which some key/value heads stream, with its attention heads in another order.

In each layer the heads that keep all tokens come first, so a graph cuts its heads in two at one
place. Tensors that make heads have their rows moved, and tensors that read heads their columns. No
value changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.stored_tensors import Identity
from cetane.checkpoint.wrapped import WrappedCheckpoint
from cetane.files import json_sha256

if TYPE_CHECKING:
    import torch

HeadOrder = tuple[int, tuple[int, ...]]
"""An axis of a tensor, and the indices that it has along it."""


@dataclass(frozen=True)
class SeenByHeads:
    """What the key/value heads of a model see: all tokens, or the first `sinks` and the last
    `window`."""

    full: Mapping[int, tuple[int, ...]]
    """The heads that see all tokens, ascending, by layer. A layer without an entry sees what its
    model lets it see."""
    sinks: int
    window: int

    def in_order(self) -> SeenByHeads:
        """The same, where the heads that see all tokens come first in their layer."""
        first = {layer: tuple(range(len(heads))) for layer, heads in self.full.items()}
        return SeenByHeads(first, self.sinks, self.window)


class StreamedCheckpoint(WrappedCheckpoint):
    """A checkpoint with the attention heads that see all tokens first."""

    def __init__(
        self, base: Checkpoint, seen: SeenByHeads, orders: Mapping[str, HeadOrder]
    ) -> None:
        """`seen` numbers heads as the base does. `orders` are by tensor name; tensors without an
        order stay as they are."""
        super().__init__(base)
        self.seen, self.orders = seen, orders

    def read(self, name: str) -> torch.Tensor:
        tensor = self.base.read(name)
        if name not in self.orders:
            return tensor
        axis, order = self.orders[name]
        import torch

        return tensor.index_select(axis, torch.tensor(order))

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self.orders:
            return self.base.read_rows(name, start, stop)
        return self.read(name)[start:stop].clone()

    def identified(self, identity: Identity) -> str:
        orders = {name: list(order) for name, order in sorted(self.orders.items())}
        seen = asdict(self.seen) | {"full": sorted(self.seen.full.items())}
        return json_sha256([self.base.identified(identity), seen, orders])


def streamed_part(checkpoint: object) -> StreamedCheckpoint | None:
    """The checkpoint itself, or the one inside it, of which heads stream; None if none does."""
    while isinstance(checkpoint, WrappedCheckpoint):
        if isinstance(checkpoint, StreamedCheckpoint):
            return checkpoint
        checkpoint = checkpoint.base
    return None
