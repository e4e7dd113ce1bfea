"""Attention as most families have it: heads that are projected, normed and mixed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn, sigmoid

from cetane.families.base import Flow, Memory, ValueSpace
from cetane.families.blocks import Mixer
from cetane.families.grouped_query import AttentionHeads, KeysOrValues, attend
from cetane.families.kinds import LayerKind
from cetane.families.layers import (
    Exchange,
    LayerNorm,
    Leaf,
    Projection,
    RMSNorm,
    layer_norm,
    normalize,
)

HeadNorm = Literal["none", "unit", "head", "whole", "layer", "stacked", "listed"]
"""The kinds of norms of queries and keys: see `AttentionForm.norms`."""


@dataclass(frozen=True)
class AttentionForm:
    """What differs between families."""

    qkv_bias: bool = False
    out_bias: bool = False
    norms: HeadNorm = "none"
    """How queries and keys are normed. `head` and `unit` norm each attention head, `unit` without
    gains; `whole` norms all heads together. The others are LayerNorms of each attention head: with
    `layer` all heads share gains and biases, `stacked` and `listed` are `StackedNorms` and
    `ListedNorms`."""
    unit_offset: bool = False
    """Whether the checkpoint stores the gains of these norms less one."""
    clip: float | None = None
    """The bound of queries, keys and values: after a norm of all heads together, before any
    other."""
    gates: Literal["channel", "head"] | None = None
    """Whether the sigmoid of a projection of the input multiplies what the heads give: a number for
    each channel, or for each head."""
    gate: str = "gate_proj"
    """The checkpoint's name for this projection."""
    gate_bias: bool = False
    """Whether this projection has biases; only gates of channels have some."""
    sinks: bool = False
    """Whether each query head has a sink: one more score, of a key without a value."""
    output: str = "o_proj"
    """The checkpoint's name for the projection of what the heads give."""
    inner_norm: str | None = None
    """Its name for a norm of what all heads give, before that projection; None for none."""
    normed: tuple[str, str] = ("q_norm", "k_norm")
    """Its names for the norms of queries and keys."""
    normed_last: bool = False
    """Whether queries and keys are normed after they got their positions."""


def normed_by(norms: HeadNorm, there: bool | None) -> HeadNorm:
    """The norms of queries and keys, where there are some."""
    return norms if there else "none"


class Sinks(Leaf):
    """The sink's score of each query head, `(1, KV, G, 1)`."""

    weight: Tensor

    def __init__(self, heads: AttentionHeads) -> None:
        super().__init__()
        self.hold("weight", (1, heads.kv, heads.query // heads.kv, 1), (heads.query,))


class UnitNorm(nn.Module):
    """A norm of each attention head, without gains."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.dim, self.eps, axis=2)


class StackedNorms(Leaf):
    """A LayerNorm of each attention head with gains of its own, which are one tensor."""

    weight: Tensor

    def __init__(self, count: int, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.hold("weight", (1, count, dim, 1), (count, dim))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, 2, self.eps) * self.weight


class ListedNorms(nn.Module):
    """The same, with a tensor for each head: `norms.0`, `norms.1` ..."""

    def __init__(self, count: int, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        each = (LayerNorm(dim, eps, axis=2, bias=False) for _ in range(count))
        self.norms = nn.ModuleList(each)

    def forward(self, x: Tensor) -> Tensor:
        gains = torch.stack([one.get_parameter("weight") for one in self.norms])
        return layer_norm(x, 2, self.eps) * gains


class Attention(Mixer):
    """The mixer of most layers."""

    readers: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")

    def __init__(
        self,
        size: int,
        eps: float,
        kind: LayerKind,
        form: AttentionForm,
        factor: float = 1.0,
        inverse: float = 1.0,
    ) -> None:
        """`size` is the width of its input, `eps` that of the norms of queries and keys. `factor`
        multiplies its output. Its input is `inverse` times the model's."""
        super().__init__()
        self.heads, self.form, self.writer = kind.heads, form, form.output
        self.attend_by((kind,))
        heads, bias = self.heads, form.qkv_bias
        inner, shared = heads.query * heads.dim, heads.kv * heads.dim
        self.q_proj = Projection(size, inner, "attention", bias, inverse=inverse)
        self.k_proj = Projection(size, shared, "attention", bias, inverse=inverse)
        self.v_proj = Projection(size, shared, "attention", bias, inverse=inverse)
        if form.gates is not None:
            gate = (
                Projection(size, inner, "attention", form.gate_bias, inverse=inverse)
                if form.gates == "channel"
                else Projection(size, heads.query, None, inverse=inverse)  # fewer rows than a group
            )
            self.add_module(form.gate, gate)
            self.readers = (*self.readers, form.gate)
        output = Projection(inner, size, "attention", form.out_bias, factor)
        self.add_module(form.output, output)
        if form.inner_norm is not None:
            self.add_module(form.inner_norm, RMSNorm(inner, eps))
        for name, count in zip(form.normed, (heads.query, heads.kv), strict=True):
            self.add_module(name, self.norm(count, eps))
        if form.sinks:
            self.sinks = Sinks(heads)

    def attend_by(self, kinds: tuple[LayerKind, ...]) -> None:
        """Divide the heads among some kinds, in order: each takes its kind's mask and caches.

        All kinds give queries and keys the same positions.
        """
        self.kind, self.kinds = kinds[0], kinds
        self.reads = tuple(dict.fromkeys(name for kind in kinds for name in kind.reads))
        self.keeps = tuple(kind.name for kind in kinds)

    def norm(self, count: int, eps: float) -> nn.Module:
        """The norm of some heads."""
        dim, unit = self.heads.dim, self.form.unit_offset
        match self.form.norms:
            case "none":
                return nn.Identity()
            case "unit":
                return UnitNorm(dim, eps)
            case "head":
                return RMSNorm(dim, eps, axis=2, unit_offset=unit)
            case "layer":
                return LayerNorm(dim, eps, axis=2)
            case "stacked":
                return StackedNorms(count, dim, eps)
            case "listed":
                return ListedNorms(count, dim, eps)
        return RMSNorm(count * dim, eps, unit_offset=unit)

    def project(self, x: Tensor, letter: str, count: int) -> Tensor:
        """Queries, keys or values `(1, count, D, T)`."""
        whole, made = self.form.norms == "whole", self.get_submodule(f"{letter}_proj")(x)
        norm = self.norm_of(letter)
        made = norm(made) if whole else made
        if self.form.clip is not None:
            made = made.clamp(-self.form.clip, self.form.clip)
        made = self.heads.split(made, count)
        return made if whole or self.form.normed_last else norm(made)

    def norm_of(self, letter: str) -> Callable[[Tensor], Tensor]:
        """The norm of queries or keys; values have none."""
        names = dict(zip("qk", self.form.normed, strict=True))
        return self.get_submodule(names[letter]) if letter in names else nn.Identity()

    def positioned(
        self, projected: Tensor, letter: str, at_positions: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Projected queries or keys with their positions."""
        made = at_positions(projected)
        return self.norm_of(letter)(made) if self.form.normed_last else made

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        heads, at_positions = self.heads, self.kind.at_positions(flow)
        q = self.positioned(self.project(x, "q", heads.query), "q", at_positions)
        if len(self.kinds) == 1:
            keys, values = self.keys_values(x, at_positions, flow, memory)
            sinks = self.sinks.weight if self.form.sinks else None
            made = attend(q, keys, values, self.kind.biases(flow), heads, sinks)
        else:
            made = self.attend_apart(q, *self.new_keys_values(x, at_positions), flow, memory)
        if self.form.gates == "head":
            made = made * self.gates(x).reshape(1, heads.query, 1, -1)
        mixed = heads.merge(made)
        if self.form.gates == "channel":
            mixed = mixed * self.gates(x)
        if self.form.inner_norm is not None:
            mixed = self.get_submodule(self.form.inner_norm)(mixed)
        output: Tensor = self.get_submodule(self.form.output)(mixed)
        return output

    def gates(self, x: Tensor) -> Tensor:
        """The gates of some tokens, a hidden tensor of a channel for each gate."""
        made: Tensor = sigmoid(self.get_submodule(self.form.gate)(x))
        return made

    def keys_values(
        self, x: Tensor, at_positions: Callable[[Tensor], Tensor], flow: Flow, memory: Memory
    ) -> tuple[KeysOrValues, KeysOrValues]:
        """All keys and values that may be seen, the new ones among them."""
        new = self.new_keys_values(x, at_positions)
        seen: tuple[KeysOrValues, KeysOrValues] = memory[self.kind.name](*new)
        return seen

    def new_keys_values(
        self, x: Tensor, at_positions: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the call's tokens, `(1, KV, D, T)`."""
        k = self.project(x, "k", self.heads.kv)
        v = self.values(self.project(x, "v", self.heads.kv))
        return self.positioned(k, "k", at_positions), v

    def attend_apart(self, q: Tensor, k: Tensor, v: Tensor, flow: Flow, memory: Memory) -> Tensor:
        """Attention of heads that see different tokens, `(1, H, D, T)`."""
        made, asked, known = [], 0, 0
        for kind in self.kinds:
            queries = q[:, asked : asked + kind.heads.query]
            own = slice(known, known + kind.heads.kv)
            keys, values = memory[kind.name](k[:, own], v[:, own])
            made.append(attend(queries, keys, values, flow[kind.mask], kind.heads))
            asked, known = asked + kind.heads.query, known + kind.heads.kv
        return torch.cat(made, dim=1)

    def values(self, v: Tensor) -> Tensor:
        """The values that are kept."""
        return v

    @property
    def owns(self) -> bool:
        """Whether it keeps its own keys, and no other layer reads them."""
        return True

    @property
    def unstreamed(self) -> str:
        """Why its heads cannot stream; empty if they can. The gates' reference for such heads knows
        only plain scores (`gates/streaming.py`)."""
        if self.form.sinks:
            return "they have learned sinks"
        if self.form.norms in ("stacked", "listed"):
            return "each has norms of its own"
        if self.form.inner_norm is not None:
            return "one norm is of all of them"
        if self.kind.slopes:
            return "their scores fall with distance"
        return "a bound holds their scores" if self.heads.softcap is not None else ""

    def headed(self) -> tuple[tuple[str, int], ...]:
        """The paths of parameters that have query or key/value heads along an axis, and this
        axis."""
        made = [(f"{self.writer}.weight", 1)]
        if self.form.gates is not None:
            made += [(f"{self.form.gate}.{leaf}", 0) for leaf in ("weight", "bias")]
        for letter in "qkv":
            made += [(f"{letter}_proj.{leaf}", 0) for leaf in ("weight", "bias")]
        if self.form.norms == "whole":
            made += [(f"{name}.weight", 0) for name in self.form.normed]
        return tuple(made)

    def value_space(self) -> ValueSpace | None:
        """None if something stands between values and output."""
        form = self.form
        if form.clip is not None or form.gates == "channel" or form.inner_norm is not None:
            return None
        return ValueSpace("v_proj", self.writer, self.heads.dim)

    def exchanges(self) -> tuple[Exchange, ...]:
        """Values and output, if nothing stands between them."""
        if self.value_space() is None:
            return ()
        heads = self.heads
        shared = heads.kv, heads.query // heads.kv, heads.dim
        return (Exchange((self.writer,), ("v_proj.weight", "v_proj.bias"), shared),)
