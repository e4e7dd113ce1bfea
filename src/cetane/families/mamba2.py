"""Mamba-2 (arXiv 2405.21060), for a call of T tokens at once.

A head keeps a matrix S. A token shrinks S by its decay, and adds its key times its value: `S += k
(step x)^T`. Its answer is `S^T q + D x`. The paper's names are B for k, and C for q. Within a call,
answers are a product of queries and keys, in which every token fades by the decays after it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Literal, Protocol

from torch import Tensor, nn

from cetane.families.axes import Axes
from cetane.families.base import Flow, Memory, Weight
from cetane.families.blocks import Mixer
from cetane.families.configs import invalid
from cetane.families.layers import (
    CausalTaps,
    Held,
    Leaf,
    Projection,
    RMSNorm,
    RowPick,
    activation,
    normalize,
)
from cetane.families.matrices import Decays, MatrixHeads, fading
from cetane.families.model import History, Matrix
from cetane.families.stored import FUSED, FusedRows, rows_between
from cetane.hardware import LARGEST_FP16

NAME = "ssm"
"""The name of the matrices of all layers."""
Gating = Literal["first", "last", "unnormed"]
"""How gates and norms of answers follow each other."""
Bounds = tuple[float | None, float | None]
"""The least and the largest step of a token; None for no bound. transformers applies them to a
text, and leaves them out for a token alone. A port always applies them: its answers do not depend
on how tokens come."""


class Mamba2Config(Protocol):
    """The keys of most configs with such layers."""

    model_type: str
    hidden_size: int
    hidden_act: str
    rms_norm_eps: float
    mamba_n_heads: int
    mamba_n_groups: int
    mamba_d_state: int
    mamba_d_head: int
    mamba_d_conv: int
    mamba_conv_bias: bool
    mamba_proj_bias: bool
    time_step_limit: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class Mamba2Form:
    """What such layers have, by whatever names a config says it."""

    size: int
    """The channels of their input and output."""
    heads: MatrixHeads
    taps: int
    act: str
    """What follows the convolution."""
    eps: float
    bounds: Bounds = (None, None)
    bias: bool = False
    """Whether the projections of the input have biases."""
    out_bias: bool = False
    conv_bias: bool = True
    gated: Gating = "first"

    @property
    def memory(self) -> dict[str, History | Matrix]:
        """What the layers keep."""
        return self.heads.memory(NAME, self.taps)


def mamba2_form(config: Mamba2Config, out_bias: bool, gated: Gating = "first") -> Mamba2Form:
    """The layers of a config with the usual keys."""
    kind, heads, groups = config.model_type, config.mamba_n_heads, config.mamba_n_groups
    least, largest = config.time_step_limit or (0.0, inf)
    return Mamba2Form(
        size=config.hidden_size,
        heads=grouped(kind, heads, groups, config.mamba_d_state, config.mamba_d_head),
        taps=config.mamba_d_conv,
        act=config.hidden_act,
        eps=config.rms_norm_eps,
        bounds=step_bounds(kind, least, largest),
        bias=config.mamba_proj_bias,
        out_bias=out_bias,
        conv_bias=config.mamba_conv_bias,
        gated=gated,
    )


def grouped(kind: str, heads: int, groups: int, keys: int, values: int) -> MatrixHeads:
    """The heads of a model type. CetaneError for groups that do not divide them."""
    if heads % groups:
        raise invalid(kind, f"{heads} heads of Mamba-2 are not a multiple of {groups} groups")
    return MatrixHeads(groups, heads // groups, keys, values)


def step_bounds(kind: str, least: float, largest: float) -> Bounds:
    """The bounds of steps. CetaneError for those between which no step is."""
    if not 0 <= least <= largest or not largest or least > LARGEST_FP16:
        raise invalid(kind, f"bounds of steps from {least} to {largest}: none is between them")
    return least or None, largest if largest <= LARGEST_FP16 else None


def state_space(
    heads: MatrixHeads, axes: Axes, q: Tensor, k: Tensor, v: Tensor, decays: Tensor
) -> Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]:
    """The rule for the tokens of a call, to which a matrix is given.

    `q`, `k (1, heads, keys, T)`, `v (1, heads * groups, values, T)`. `decays` (logarithms) are a
    hidden tensor of a channel for each value head. The rule takes a matrix `(1, heads, keys,
    groups * values)`, and gives answers like `v`, and columns for the host.
    """
    tokens = q.shape[-1]

    def rule(matrix: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        asked = q.transpose(2, 3)
        answers = (asked @ matrix).reshape(heads.key_heads, tokens, heads.groups, -1)
        products = (asked @ k).reshape(heads.key_heads, 1, tokens, tokens)
        fades, whole = fading(decays.reshape(heads.key_heads, heads.groups, tokens, 1), tokens)
        values = v.reshape(heads.key_heads, heads.groups, heads.values, tokens).transpose(2, 3)
        mixed = whole * answers.transpose(1, 2) + (fades * products) @ values
        columns = (
            k.reshape(axes.shape(heads.key_heads * heads.keys, tokens)),
            v.reshape(axes.shape(heads.count * heads.values, tokens)),
            decays,
        )
        return mixed.transpose(2, 3).reshape(v.shape), columns

    return rule


class StateSpace(Decays):
    """The parameters of the heads: those of steps and decays, and the factor D on a token's own
    input."""

    D: Tensor

    def __init__(self, heads: int, bounds: Bounds) -> None:
        """`bounds` are those of steps."""
        super().__init__(heads)
        self.hold_channels("D", heads)
        self.bounds = bounds

    def steps(self, x: Tensor) -> Tensor:
        free = super().steps(x)
        return free if self.bounds == (None, None) else free.clamp(*self.bounds)


class GroupNorm(Leaf):
    """x / rms(x) * weight, of each of some groups of channels."""

    weight: Tensor

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups, self.size, self.eps = groups, channels // groups, eps
        self.hold_channels("weight", channels)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, self.groups, self.size, -1)
        return normalize(rows, self.size, self.eps, axis=2).reshape(x.shape) * self.weight


class Mamba2(Mixer):
    """Mamba-2 behind a short convolution. A gate multiplies its answers before they are normed, or
    after; or nothing norms them."""

    readers = ("in_proj_z", "in_proj_xbc", "in_proj_dt")
    writer = "out_proj"

    def __init__(self, form: Mamba2Form, factor: float, inverse: float = 1.0) -> None:
        """`factor` multiplies its output. Its input is `inverse` times the model's."""
        super().__init__()
        size, bias, heads = form.size, form.bias, form.heads
        values, keys = heads.count * heads.values, heads.key_heads * heads.keys
        self.heads, self.axes, self.gated = heads, Axes(), form.gated
        self.sizes = [values, keys, keys]
        self.keeps = (*(("conv",) if form.taps > 1 else ()), NAME)
        self.in_proj_z = Projection(size, values, "attention", bias, inverse=inverse)
        self.in_proj_xbc = Projection(size, heads.channels, "attention", bias, inverse=inverse)
        self.in_proj_dt = Projection(size, heads.count, None, bias, inverse=inverse)
        self.conv1d = CausalTaps(heads.channels, form.taps, form.conv_bias)
        self.act = activation(form.act)
        self.space = StateSpace(heads.count, form.bounds)
        if form.gated != "unnormed":
            eps, groups = form.eps, heads.key_heads
            self.norm = RMSNorm(values, eps) if groups == 1 else GroupNorm(values, groups, eps)
        self.out_proj = Projection(values, size, "attention", form.out_bias, factor)

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        heads = self.heads
        mixed = self.in_proj_xbc(x)
        mixed = self.act(self.conv1d(memory["conv"](mixed) if "conv" in self.keeps else mixed))
        v, k, q = mixed.split(self.sizes, dim=1)
        k, q = (one.reshape(1, heads.key_heads, heads.keys, -1) for one in (k, q))
        v = v.reshape(1, heads.count, heads.values, -1)
        steps, decays = self.space(self.in_proj_dt(x))
        stepped = v * steps.reshape(1, heads.count, 1, -1)
        answers = memory[NAME](state_space(heads, self.axes, q, k, stepped, decays))
        answers = answers + v * self.space.D
        answers = answers.reshape(self.axes.shape(self.sizes[0], answers.shape[-1]))
        return self.out_proj(self.gate(answers, nn.functional.silu(self.in_proj_z(x))))

    def gate(self, answers: Tensor, gates: Tensor) -> Tensor:
        """Answers with their gates, normed or not."""
        if self.gated == "last":
            return self.norm(answers) * gates
        return answers * gates if self.gated == "unnormed" else self.norm(answers * gates)


class MambaRows(FusedRows):
    """A layer with a `Mamba2`, whose checkpoint stores the projections of its input as one tensor.

    Each is a matrix of its own in compression: rows of steps stay in fp16, and their number need
    not fit the groups of a format."""

    fused: tuple[str, ...] = ("in_proj",)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path.replace(".space.", "."), shape, held)
        part = path.split(".")[-2]
        if plain.rows is None or part not in FUSED["in_proj"]:
            return plain
        pick = RowPick(partial(rows_between, *plain.rows))
        return replace(plain, rows=None, pick=pick, part=part)
