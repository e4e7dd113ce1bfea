"""Scales of groups and blocks, spread over a weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cetane.checkpoint.quantized.tensors import Decode

if TYPE_CHECKING:
    import torch


def is_pair(block: Any) -> bool:
    """Whether `block` is a pair: the rows and columns of a block."""
    return (
        isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    )


def scaled(block: tuple[int, ...] | None = None) -> Decode:
    """(weight - zero) * scale, with a scale for all, each row, each group of columns, or each
    block."""

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, scale = parts["weight"].float(), parts["scale"].float()
        rows, columns = weight.shape

        def spread(values: torch.Tensor) -> torch.Tensor:
            if block is not None:
                high, wide = min(block[0], rows), min(block[1], columns)
                tall = values.repeat_interleave(high, 0)[:rows]
                return tall.repeat_interleave(wide, 1)[:, :columns]
            if values.numel() == 1:
                return values.reshape(1, 1)
            if "groups" in parts:
                return values[:, places(parts["groups"])]
            return values.repeat_interleave(columns // values.shape[1], 1)

        zero = parts.get("zero")
        return (weight if zero is None else weight - spread(zero.float())) * spread(scale)

    return decode


def places(groups: torch.Tensor) -> torch.Tensor:
    """The groups of a weight's columns, as indices. IndexError for negative ones, which torch would
    count from the end."""
    if bool((groups < 0).any()):
        raise IndexError("a group below 0")
    return groups.long()
