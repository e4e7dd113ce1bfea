"""Mamba of 2023 (arXiv 2312.00752), for a call of T tokens at once.

Each channel keeps a vector h of some states. A token shrinks every state by a decay of its own, and
adds its key: `h += k step x`. Its answer is `h q + D x`. The paper's names are B for k, C for q,
and delta for the step. Decays are `exp(step A)`: they differ by channel and by state, so no product
of matrices makes the answers of many tokens, as it does in Mamba-2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cetane.families.axes import Axes
from cetane.families.base import Flow, Memory, Weight
from cetane.families.blocks import Mixer
from cetane.families.layers import (
    CausalTaps,
    Held,
    Leaf,
    Projection,
    RMSNorm,
    activation,
    softplus,
)
from cetane.families.model import History, Matrix
from cetane.families.stored import FUSED, FusedRows

NAME = "ssm"
"""The name of the states of all layers."""


@dataclass(frozen=True, kw_only=True)
class ScanForm:
    """What such layers have."""

    size: int
    """The channels of their input and output."""
    channels: int
    """The channels that keep states."""
    states: int
    rank: int
    """The width of what steps are made of."""
    taps: int
    act: str
    """What follows the convolution."""
    bias: bool = False
    """Whether the projections of input and output have biases."""
    conv_bias: bool = True
    norm_eps: float | None = None
    """The epsilon of norms of what steps are made of, of keys and of queries; None for no norms."""
    norm_gains: bool = False
    """Whether these norms have gains."""

    @property
    def memory(self) -> dict[str, History | Matrix]:
        """What the layers keep. Each state is a head with a key of one number, and each channel a
        value of one."""
        made: dict[str, History | Matrix] = {NAME: Matrix(self.states, 1, 1, self.channels)}
        past = {"conv": History(self.channels, self.taps - 1)}
        return made | (past if self.taps > 1 else {})

    def norm(self, width: int) -> nn.Module:
        """The norm of a part of what `x_proj` gives."""
        if self.norm_eps is None:
            return nn.Identity()
        return RMSNorm(width, self.norm_eps, weight=self.norm_gains)


def scanned(decays: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """The share that is left of a state before the call at each token, and what the call's tokens
    have added by then.

    `decays` are shares that single tokens leave, `added` what they add, both `(1, N, C, T)`. Each
    round doubles the tokens that an element stands for (Hillis and Steele): as many rounds as a
    number of T - 1 has bits.
    """
    tokens, reach = int(added.shape[-1]), 1
    while reach < tokens:
        before = tokens - reach
        later = added[..., reach:] + decays[..., reach:] * added[..., :before]
        shares = decays[..., reach:] * decays[..., :before]
        added = torch.cat([added[..., :reach], later], dim=-1)
        decays = torch.cat([decays[..., :reach], shares], dim=-1)
        reach *= 2
    return decays, added


def selective_scan(
    axes: Axes, q: Tensor, k: Tensor, v: Tensor, decays: Tensor
) -> Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]:
    """The rule for the tokens of a call, to which states are given.

    `q`, `k (1, N, 1, T)`, `v (1, 1, C, T)`, `decays (1, N, C, T)` (logarithms). The rule takes
    states `(1, N, 1, C)`, and gives answers `(1, 1, C, T)`, and columns for the host.
    """
    states, channels, tokens = decays.shape[1:]

    def rule(before: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        left, added = scanned(decays.exp(), k * v)
        answers = ((left * before.transpose(2, 3) + added) * q).sum(1, keepdim=True)
        columns = (
            k.reshape(axes.shape(states, tokens)),
            v.expand(1, states, channels, tokens).reshape(axes.shape(states * channels, tokens)),
            decays.reshape(axes.shape(states * channels, tokens)),
        )
        return answers, columns

    return rule


def minus_exp_of_states(stored: Tensor) -> Tensor:
    """-e^x in fp32, `(C, N)` -> `(1, N, C, 1)`."""
    return -stored.float().exp().T[None, :, :, None]


class Rates(Leaf):
    """The logarithm of a decay for a step of 1, by state and channel, and the factor D on a token's
    own input."""

    A_log: Tensor
    D: Tensor

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        shape = (1, states, channels, 1)
        self.hold("A_log", shape, (channels, states), pick=minus_exp_of_states)
        self.hold_channels("D", channels, axis=2)


NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")
"""The checkpoint's names for norms of the parts of what `x_proj` gives."""


class SelectiveScan(Mixer):
    """Such a layer's mixer: a short convolution, the scan, and a gate."""

    readers = ("in_proj_x", "in_proj_z")
    writer = "out_proj"

    def __init__(self, form: ScanForm, factor: float, inverse: float = 1.0) -> None:
        """`factor` multiplies its output. Its input is `inverse` times the model's."""
        super().__init__()
        size, channels, bias = form.size, form.channels, form.bias
        self.form, self.axes = form, Axes()
        self.keeps = (*(("conv",) if form.taps > 1 else ()), NAME)
        self.in_proj_x = Projection(size, channels, "attention", bias, inverse=inverse)
        self.in_proj_z = Projection(size, channels, "attention", bias, inverse=inverse)
        self.conv1d = CausalTaps(channels, form.taps, form.conv_bias)
        self.act = activation(form.act)
        # Few rows, and few columns: no format's groups need fit them.
        self.x_proj = Projection(channels, form.rank + 2 * form.states, None)
        self.parts = [form.rank, form.states, form.states]
        for name, width in zip(NORMS, self.parts, strict=True):
            self.add_module(name, form.norm(width))
        self.dt_proj = Projection(form.rank, channels, None, bias=True)
        self.rates = Rates(channels, form.states)
        self.out_proj = Projection(channels, size, "attention", bias, factor)

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        form, axes = self.form, self.axes
        mixed = self.in_proj_x(x)
        mixed = self.act(self.conv1d(memory["conv"](mixed) if "conv" in self.keeps else mixed))
        made = self.x_proj(mixed).split(self.parts, dim=1)
        timed, k, q = (self.get_submodule(n)(x) for n, x in zip(NORMS, made, strict=True))
        steps = softplus(self.dt_proj(timed)).reshape(1, 1, form.channels, -1)
        k, q = (part.reshape(1, form.states, 1, -1) for part in (k, q))
        v = mixed.reshape(1, 1, form.channels, -1)
        answers = memory[NAME](selective_scan(axes, q, k, v * steps, steps * self.rates.A_log))
        answers = answers + v * self.rates.D
        answers = answers.reshape(axes.shape(form.channels, answers.shape[-1]))
        output: Tensor = self.out_proj(answers * nn.functional.silu(self.in_proj_z(x)))
        return output


class ScanRows(FusedRows):
    """A layer with a `SelectiveScan`, whose checkpoint stores the projections of its input as one
    tensor."""

    fused: tuple[str, ...] = ("in_proj",)
    parts: Mapping[str, tuple[str, ...]] = FUSED | {"in_proj": SelectiveScan.readers}

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace(".rates.", "."), shape, held)
