"""Layers whose checkpoints store rows of matrices otherwise than their graphs use them."""

from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, cat

from cetane.families.base import Block, Weight
from cetane.families.blocks import ParallelBlock, PreNormBlock
from cetane.families.layers import Held, RowPick
from cetane.families.rotary import last_to_halves, to_halves

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
}
"""Names of tensors in which projections of one input stand one below the other."""


class InterleavedRows(Block):
    """A layer whose checkpoint pairs neighbouring channels (0, 1), (2, 3) ... of each head, which
    may have norms with gains of its own."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        if path in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            return replace(plain, pick=last_to_halves)
        if not path.startswith(("self_attn.q_proj.", "self_attn.k_proj.")):
            return plain
        attention: Any = self.get_submodule("self_attn")
        heads, rotary = attention.kind.heads, attention.kind.rotary
        pick = RowPick(partial(rows_in_halves, heads.dim, rotary.width))
        return replace(plain, pick=pick, part=path.split(".")[1])


class InterleavedBlock(InterleavedRows, PreNormBlock):
    """An ordinary layer with such rows."""


class InterleavedParallelBlock(InterleavedRows, ParallelBlock):
    """The same, with attention and MLP beside each other."""


def rows_in_halves(dim: int, width: int, stored: Tensor) -> Tensor:
    """The first `width` rows of each head as two halves; of a weight or a bias."""
    heads = stored.reshape(len(stored) // dim, dim, -1)
    return cat([to_halves(heads[:, :width]), heads[:, width:]], 1).reshape(stored.shape)


class FusedRows(Block):
    """A layer whose checkpoint stores projections as one tensor: those of a name in `fused`."""

    fused: tuple[str, ...] = ("qkv_proj", "gate_up_proj")

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        module, _, name = path.removesuffix(".weight").rpartition(".")
        whole = next((whole for whole in self.fused if name in FUSED[whole]), None)
        if whole is None or plain.of_experts:
            return plain
        parts = FUSED[whole]
        projections: list[Any] = [self.get_submodule(f"{module}.{part}") for part in parts]
        sizes = [int(one.outputs) for one in projections]
        start = sum(sizes[: parts.index(name)])
        return replace(
            plain,
            name=f"{plain.name.removesuffix(f'{name}.weight')}{whole}.weight",
            stored=(sum(sizes), *held.stored[1:]),
            rows=(start, start + sizes[parts.index(name)]),
        )


class FusedBlock(FusedRows, PreNormBlock):
    """An ordinary layer with such tensors."""
