"""The gated delta rule (arXiv 2412.06464), for a call of T tokens at once.

A head keeps a matrix S. A token shrinks S by its decay, and corrects what S answers to its key:
`S += k (beta (v - S^T k))^T`. Its answer is `S^T q`. With A the products of keys within the call,
the corrections of all tokens solve a triangular system, (I + A) x = r.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from cetane.families.axes import Axes
from cetane.families.base import Flow, Memory
from cetane.families.blocks import Mixer
from cetane.families.configs import invalid
from cetane.families.kinds import FULL, LINEAR
from cetane.families.layers import (
    CausalTaps,
    Projection,
    RMSNorm,
    activation,
    normalize,
)
from cetane.families.matrices import Decays, MatrixHeads, fading

LAYER_TYPES = (LINEAR, FULL)
"""The types of layers of a model with this rule, as its config names them."""


class DeltaConfig(Protocol):
    """The keys of a config that describe the rule's heads."""

    model_type: str
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int


def delta_heads(config: DeltaConfig) -> MatrixHeads:
    """The heads of the delta rule. CetaneError for value heads that do not come in groups."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise invalid(
            config.model_type,
            f"linear_num_value_heads = {values} is not a multiple of linear_num_key_heads = {keys}",
        )
    groups = values // keys
    return MatrixHeads(keys, groups, config.linear_key_head_dim, config.linear_value_head_dim)


BLOCK = 4
"""The tokens whose corrections are solved for at once: (I + A)^-1 = (I - A)(I + A^2) as A^4 = 0.
Longer products would cancel in fp16."""


def delta_rule(
    heads: MatrixHeads,
    axes: Axes,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    rates: Tensor,
) -> Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]:
    """The rule for the tokens of a call, to which a matrix is given.

    `q`, `k (1, heads, keys, T)`, `v (1, heads * groups, values, T)`. `decays` (logarithms) and
    `rates` of correction are hidden tensors of a channel for each value head. The rule takes a
    matrix `(1, heads, keys, groups * values)`, and gives answers like `v`, and columns for the
    host.
    """
    tokens, groups = q.shape[-1], heads.groups
    per_head = heads.key_heads, groups, tokens, 1

    def rule(matrix: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        asked = torch.cat([k, q], dim=-1).transpose(2, 3)
        answers = (asked @ matrix).reshape(heads.key_heads, 2 * tokens, groups, -1).transpose(1, 2)
        products = (asked @ k).reshape(heads.key_heads, 1, 2 * tokens, tokens)
        fades, whole = fading(decays.reshape(per_head), tokens)
        rate = rates.reshape(per_head)
        wanted = v.reshape(heads.key_heads, groups, heads.values, tokens).transpose(2, 3)
        rest = rate * (wanted - whole * answers[:, :, :tokens])
        earlier = rate * fades * products[:, :, :tokens] * torch.ones(tokens, tokens).tril(-1)
        values = solve(earlier, rest, tokens)
        mixed = whole * answers[:, :, tokens:] + (fades * products[:, :, tokens:]) @ values
        columns = (
            k.reshape(axes.shape(heads.key_heads * heads.keys, tokens)),
            values.transpose(2, 3).reshape(axes.shape(heads.count * heads.values, tokens)),
            decays,
        )
        return mixed.transpose(2, 3).reshape(v.shape), columns

    return rule


def solve(earlier: Tensor, rest: Tensor, tokens: int) -> Tensor:
    """The x with `x + earlier @ x = rest`, for `earlier (..., T, T)` below its diagonal."""
    solved: Tensor | None = None
    for start in range(0, tokens, BLOCK):
        stop = min(start + BLOCK, tokens)
        mine = rest[:, :, start:stop]
        if solved is not None:
            mine = mine - earlier[:, :, start:stop, :start] @ solved
        if stop - start > 1:
            own = earlier[:, :, start:stop, start:stop]
            mine = mine + own @ (own @ mine)
            mine = mine - own @ mine
        solved = mine if solved is None else torch.cat([solved, mine], dim=2)
    assert solved is not None
    return solved


TINY = 1e-6
"""What transformers adds to the squared length of keys and queries."""
RAISED_ANSWERS = 32.0
"""The factor on queries, and so on answers; the norm of the answers undoes it. A power of two
changes no digit. Programs keep the norm's epsilon in fp16, where 1e-6 is 1.013e-6, among the
subnormal numbers. That shows where answers are small, as those of random weights."""


APART = ("q_proj", "k_proj", "v_proj")
"""The projections of queries, keys and values, where they are three."""


class DeltaNet(Mixer):
    """The gated delta rule behind a short convolution, for `size` channels. `act` follows the
    convolution, `factor` multiplies the output."""

    def __init__(
        self,
        size: int,
        heads: MatrixHeads,
        taps: int,
        act: str,
        eps: float,
        factor: float,
        most: float = 1.0,
        apart: bool = False,
    ) -> None:
        """`most` is the largest rate of correction. `apart` says whether queries, keys and values
        have projections of their own."""
        super().__init__()
        self.most, self.apart = most, apart
        self.act = activation(act)
        self.heads, self.axes, self.taps = heads, Axes(), taps
        self.keeps = (*(("conv",) if taps > 1 else ()), "delta")
        values = heads.count * heads.values
        self.sizes = [heads.key_heads * heads.keys] * 2 + [values]
        if apart:
            for name, outputs in zip(APART, self.sizes, strict=True):
                self.add_module(name, Projection(size, outputs, "attention"))
        else:
            self.in_proj_qkv = Projection(size, heads.channels, "attention")
        self.in_proj_z = Projection(size, values, "attention")
        self.in_proj_b = Projection(size, heads.count, None)
        self.in_proj_a = Projection(size, heads.count, None)
        self.conv1d = CausalTaps(heads.channels, self.taps, bias=False)
        self.decays = Decays(heads.count)
        self.norm = RMSNorm(heads.values, eps * RAISED_ANSWERS**2, axis=2)
        self.out_proj = Projection(values, size, "attention", factor=factor)

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        heads, silu = self.heads, nn.functional.silu  # the gate's, whatever the config says
        mixed = self.projected(x)
        mixed = self.act(self.conv1d(memory["conv"](mixed) if self.taps > 1 else mixed))
        q, k, v = mixed.split(self.sizes, dim=1)
        q, k = (one.reshape(1, heads.key_heads, heads.keys, -1) for one in (q, k))
        q, k = self.unit(q, heads.keys**-0.5 * RAISED_ANSWERS), self.unit(k)
        v = v.reshape(1, heads.count, heads.values, -1)
        rates = torch.sigmoid(self.in_proj_b(x))
        rates = rates * self.most if self.most != 1 else rates
        _, decays = self.decays(self.in_proj_a(x))
        rule = delta_rule(heads, self.axes, q, k, v, decays, rates)
        answers = self.norm(memory["delta"](rule))
        gated = answers * silu(self.in_proj_z(x).reshape(answers.shape))
        return self.out_proj(gated.reshape(self.axes.shape(self.sizes[2], gated.shape[-1])))

    def projected(self, x: Tensor) -> Tensor:
        """Queries, keys and values, one below the other."""
        if not self.apart:
            made: Tensor = self.in_proj_qkv(x)
            return made
        return torch.cat([self.get_submodule(name)(x) for name in APART], dim=1)

    def unit(self, x: Tensor, length: float = 1.0) -> Tensor:
        """Queries or keys `(1, heads, keys, T)`, each brought to a length.

        `normalize` divides by the root of a mean square; the last factor makes a sum of the mean.
        """
        size = self.heads.keys
        return normalize(x, size, TINY / size, axis=2) * (size**-0.5 * length)
