"""Attention as most families have it: heads that are projected, normed, turned and mixed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn, sigmoid

from cetane.families.base import Flow, Memory
from cetane.families.blocks import Mixer
from cetane.families.kinds import LayerKind
from cetane.families.layers import (
    AttentionHeads,
    Exchange,
    Leaf,
    Projection,
    RMSNorm,
    attend,
    normalize,
)


@dataclass(frozen=True)
class AttentionForm:
    """What differs between families."""

    qkv_bias: bool = False
    out_bias: bool = False
    norms: Literal["none", "unit", "head", "whole"] = "none"
    """Whether queries and keys are normed: each attention head, `unit` without gains, or all heads
    together."""
    unit_offset: bool = False
    """Whether the checkpoint stores the gains of these norms less one."""
    clip: float | None = None
    """The bound of queries, keys and values, after their norms."""
    gated: bool = False
    """Whether a sigmoid of the input multiplies what the heads give."""
    sinks: bool = False
    """Whether each query head has a score for nothing."""
    output: str = "o_proj"
    """The checkpoint's name for the projection of what the heads give."""
    norm: str = "norm"
    """The ending of its names for the norms of queries and keys."""


class Sinks(Leaf):
    """A score for each query head, `(1, KV, G, 1)`."""

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


class Attention(Mixer):
    """The mixer of most layers."""

    readers = ("q_proj", "k_proj", "v_proj")

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
        self.kind, self.heads, self.form = kind, kind.heads, form
        self.reads, self.keeps, self.writer = kind.reads, (kind.name,), form.output
        heads, bias = self.heads, form.qkv_bias
        inner, shared = heads.query * heads.dim, heads.kv * heads.dim
        self.q_proj = Projection(size, inner, "attention", bias, inverse=inverse)
        self.k_proj = Projection(size, shared, "attention", bias, inverse=inverse)
        self.v_proj = Projection(size, shared, "attention", bias, inverse=inverse)
        if form.gated:
            self.gate_proj = Projection(size, inner, "attention", bias, inverse=inverse)
        output = Projection(inner, size, "attention", form.out_bias, factor)
        self.add_module(form.output, output)
        for letter, count in (("q", heads.query), ("k", heads.kv)):
            self.add_module(f"{letter}_{form.norm}", self.norm(count, eps))
        if form.sinks:
            self.sinks = Sinks(heads)

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
        return RMSNorm(count * dim, eps, unit_offset=unit)

    def project(self, x: Tensor, letter: str, count: int) -> Tensor:
        """Queries, keys or values `(1, count, D, T)`."""
        whole, made = self.form.norms == "whole", self.get_submodule(f"{letter}_proj")(x)
        norm: Callable[[Tensor], Tensor] = getattr(
            self, f"{letter}_{self.form.norm}", nn.Identity()
        )
        made = norm(made) if whole else made
        if self.form.clip is not None:
            made = made.clamp(-self.form.clip, self.form.clip)
        made = self.heads.split(made, count)
        return made if whole else norm(made)

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        heads, turn = self.heads, self.kind.turn(flow)
        q = self.project(x, "q", heads.query)
        keys, values = self.keys_values(x, turn, flow, memory)
        sinks = self.sinks.weight if self.form.sinks else None
        mixed = heads.merge(attend(turn(q), keys, values, flow[self.kind.mask], heads, sinks))
        if self.form.gated:
            mixed = mixed * sigmoid(self.gate_proj(x))
        output: Tensor = self.get_submodule(self.form.output)(mixed)
        return output

    def keys_values(
        self, x: Tensor, turn: Callable[[Tensor], Tensor], flow: Flow, memory: Memory
    ) -> tuple[Tensor, Tensor]:
        """All keys and values that may be seen, the new ones among them."""
        k = self.project(x, "k", self.heads.kv)
        v = self.values(self.project(x, "v", self.heads.kv))
        seen: tuple[Tensor, Tensor] = memory[self.kind.name](turn(k), v)
        return seen

    def values(self, v: Tensor) -> Tensor:
        """The values that are kept."""
        return v

    def heads_turn(self) -> tuple[str, str, int]:
        return "v_proj", self.writer, self.heads.dim

    def exchanges(self) -> tuple[Exchange, ...]:
        """None if something stands between values and output."""
        if self.form.clip is not None or self.form.gated:
            return ()
        heads = self.heads
        shared = heads.kv, heads.query // heads.kv, heads.dim
        return (Exchange((self.writer,), ("v_proj.weight", "v_proj.bias"), shared),)
