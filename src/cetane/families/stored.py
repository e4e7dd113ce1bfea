"""Layers whose checkpoints store rows of matrices otherwise than their graphs use them."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, cat

from cetane.families.base import Block, Weight
from cetane.families.blocks import ParallelBlock, PartNames, PreNormBlock
from cetane.families.layers import Held, RowPick
from cetane.families.rotary import last_to_halves, to_halves

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "input_linear": ("gate_proj", "up_proj"),
    "c_attn": ("q_proj", "k_proj", "v_proj"),
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "in_proj": ("in_proj_z", "in_proj_xbc", "in_proj_dt"),
}
"""Names of tensors that hold several projections of one input."""


class InterleavedRows(Block):
    """A layer whose checkpoint pairs neighbouring channels (0, 1), (2, 3) ... of each head, which
    may have norms with gains of its own."""

    names: Any
    """`PartNames`, perhaps those of a `SandwichBlock`."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain, mixer = super().weight(path, shape, held), self.names.mixer
        if path in (f"{mixer}.q_norm.weight", f"{mixer}.k_norm.weight"):
            return replace(plain, pick=last_to_halves)
        if not path.startswith((f"{mixer}.q_proj.", f"{mixer}.k_proj.")):
            return plain
        attention: Any = self.get_submodule(mixer)
        heads, rotary = attention.kind.heads, attention.kind.rotary
        pick = RowPick(partial(rows_in_halves, heads.dim, rotary.width))
        return replace(plain, pick=pick, part=path.split(".")[1])


class InterleavedBlock(InterleavedRows, PreNormBlock):
    """An ordinary layer with such rows."""


class InterleavedParallelBlock(InterleavedRows, ParallelBlock):
    """The same, with attention and MLP beside each other."""


class SinkBlock(PreNormBlock):
    """A layer whose attention has sinks, which the checkpoint keeps as a vector."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace("sinks.weight", "sinks"), shape, held)


def rows_in_halves(dim: int, width: int, stored: Tensor) -> Tensor:
    """The first `width` rows of each head as two halves; of a weight or a bias."""
    heads = stored.reshape(len(stored) // dim, dim, -1)
    return cat([to_halves(heads[:, :width]), heads[:, width:]], 1).reshape(stored.shape)


class ExchangedHalvesBlock(PreNormBlock):
    """A layer whose checkpoint rotates heads the other way: as if their halves changed places.

    No gains of norms may tell the halves apart."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        if not path.startswith(("self_attn.q_proj.", "self_attn.k_proj.")):
            return plain
        attention: Any = self.get_submodule("self_attn")
        pick = RowPick(partial(halves_exchanged, attention.heads.dim))
        return replace(plain, pick=pick, part=path.split(".")[1])


def halves_exchanged(dim: int, stored: Tensor) -> Tensor:
    """Rows of heads, the second half of each before the first; of a weight or a bias."""
    return stored.unflatten(0, (-1, 2, dim // 2)).flip(1).flatten(0, 2)


class HeadedRows(Block):
    """A layer whose checkpoint stores queries, keys and values as one tensor. It has the rows of
    each key head together: those of its queries, of its key, and of its value."""

    names: PartNames
    headed: str = "query_key_value"
    """The checkpoint's name for the tensor."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain, mixer = super().weight(path, shape, held), self.names.mixer
        name, _, leaf = path.removeprefix(f"{mixer}.").partition(".")
        if name not in FUSED["query_key_value"]:
            return plain
        attention: Any = self.get_submodule(mixer)
        heads, part = attention.heads, FUSED["query_key_value"].index(name)
        sizes = (heads.query // heads.kv * heads.dim, heads.dim, heads.dim)
        return replace(
            plain,
            name=f"{self.prefix}{mixer}.{self.headed}.{leaf}",
            stored=(heads.kv * sum(sizes), *held.stored[1:]),
            pick=RowPick(partial(parts_of, heads.kv, sizes, (part,))),
            part=name,
        )


class HeadedBlock(HeadedRows, PreNormBlock):
    """An ordinary layer with such a tensor."""


class HeadedParallelBlock(HeadedRows, ParallelBlock):
    """The same, with attention and MLP beside each other."""


def parts_of(heads: int, sizes: tuple[int, ...], wanted: tuple[int, ...], stored: Tensor) -> Tensor:
    """Some parts of the rows of every head, part by part: `(heads * sum(sizes), ...)`."""
    parts = stored.unflatten(0, (heads, sum(sizes))).split(sizes, dim=1)
    return cat([parts[number].flatten(0, 1) for number in wanted])


class FusedRows(Block):
    """A layer whose checkpoint stores projections as one tensor: those of a name in `fused`."""

    fused: tuple[str, ...] = ("qkv_proj", "gate_up_proj")
    parts: Mapping[str, tuple[str, ...]] = FUSED
    """The projections that each tensor holds."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        place, _, leaf = path.rpartition(".")
        module, _, name = place.rpartition(".")
        whole = next((whole for whole in self.fused if name in self.parts[whole]), None)
        if whole is None or plain.of_experts:
            return plain
        parts = self.parts[whole]
        projections: list[Any] = [self.get_submodule(f"{module}.{part}") for part in parts]
        sizes = [int(one.outputs) for one in projections]
        start = sum(sizes[: parts.index(name)])
        return replace(
            plain,
            name=f"{plain.name.removesuffix(f'{name}.{leaf}')}{whole}.{leaf}",
            stored=(sum(sizes), *held.stored[1:]),
            rows=(start, start + sizes[parts.index(name)]),
        )


class FusedBlock(FusedRows, PreNormBlock):
    """An ordinary layer with such tensors."""


def rows_between(start: int, stop: int, stored: Tensor) -> Tensor:
    """Some neighbouring rows of a matrix or of a bias."""
    return stored[start:stop]
