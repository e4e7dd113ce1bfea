"""Compressed Convolutional Attention (arXiv 2510.04476).

Queries and keys pass two short convolutions. Half of a token's values come from the token before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cetane.families.base import Flow, Memory
from cetane.families.blocks import Mixer
from cetane.families.grouped_query import AttentionHeads, attend
from cetane.families.kinds import LayerKind
from cetane.families.layers import CausalConvolution, CausalTaps, Leaf, Projection, normalize
from cetane.families.model import History

EPSILON = 1e-12
"""Added under the root of the q/k norm, so that zeros stay zero. The original adds nothing."""


@dataclass(frozen=True)
class TapCounts:
    """The taps of both convolutions: per channel, then per head."""

    channel: int
    head: int

    @property
    def past(self) -> int:
        """The number of earlier tokens that they see."""
        return self.channel + self.head - 2

    def histories(self, heads: AttentionHeads) -> dict[str, History]:
        """What the layers keep of earlier tokens."""
        kept = {"delayed": History(heads.kv * heads.dim // 2, 1)}
        if self.past:
            kept["conv"] = History((heads.query + heads.kv) * heads.dim, self.past)
        return kept


class Values(nn.Module):
    """Values: half of the channels come from this token, half from the token before."""

    def __init__(self, size: int, heads: AttentionHeads, bias: bool) -> None:
        super().__init__()
        half = heads.kv * heads.dim // 2
        self.heads = heads
        self.v_proj_current = Projection(size, half, "attention", bias)
        self.v_proj_delayed = Projection(size, half, "attention", bias)
        self.past = (slice(None),) * heads.axes.time + (slice(None, -1),)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        # The bias is added after the delay, so the value before the first token is the bias.
        projected = self.v_proj_delayed.contract(x)
        delayed = memory["delayed"](projected)[self.past]
        if self.v_proj_delayed.bias is not None:
            delayed = delayed + self.v_proj_delayed.bias.reshape(-1, 1, 1)
        return self.heads.split(torch.cat([self.v_proj_current(x), delayed], 1), self.heads.kv)


class Convolutions(nn.Module):
    """Two causal convolutions over the stream of queries and keys: per channel, then per head."""

    def __init__(self, heads: AttentionHeads, taps: TapCounts) -> None:
        super().__init__()
        count = heads.query + heads.kv
        channels = count * heads.dim
        self.remembers = taps.past > 0
        self.conv_qk_depthwise = CausalTaps(channels, taps.channel)
        self.conv_qk_grouped = CausalConvolution(channels, taps.head, count)

    def forward(self, qk: Tensor, memory: Memory) -> Tensor:
        qk = memory["conv"](qk) if self.remembers else qk
        return self.conv_qk_grouped(self.conv_qk_depthwise(qk))


class Means(nn.Module):
    """The residual path of queries and keys: means of each query with its key, and the reverse."""

    def __init__(self, heads: AttentionHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        kv, dim = self.heads.kv, self.heads.dim
        queries = q.reshape(kv, self.heads.query // kv, dim, -1)
        queries = (queries + k.reshape(kv, 1, dim, -1)) * 0.5
        return queries.reshape(1, self.heads.query, dim, -1), queries.mean(1).reshape(
            1, kv, dim, -1
        )


class QKNorm(Leaf):
    """Scales queries and keys to length sqrt(D), and keys by the temperature of their head."""

    temp: Tensor

    def __init__(self, heads: AttentionHeads) -> None:
        super().__init__()
        self.dim = heads.dim
        self.hold_channels("temp", heads.kv)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        unit = [normalize(x, self.dim, EPSILON, axis=2) for x in (q, k)]
        return unit[0], unit[1] * self.temp


class CompressedAttention(Mixer):
    """Compressed Convolutional Attention."""

    def __init__(self, size: int, kind: LayerKind, taps: TapCounts, bias: bool) -> None:
        super().__init__()
        self.kind, self.heads = kind, kind.heads
        self.reads = kind.reads
        self.keeps = (kind.name, "delayed", *(["conv"] if taps.past else []))
        heads = self.heads
        self.q_proj = Projection(size, heads.query * heads.dim, "attention", bias)
        self.k_proj = Projection(size, heads.kv * heads.dim, "attention", bias)
        self.values = Values(size, heads, bias)
        self.convolutions = Convolutions(heads, taps)
        self.means = Means(heads)
        self.qk_norm = QKNorm(heads)
        self.o_proj = Projection(heads.query * heads.dim, size, "attention", bias)

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        heads, at_positions = self.heads, self.kind.at_positions(flow)
        q, k = self.q_proj(x), self.k_proj(x)
        mixed = self.convolutions(torch.cat([q, k], 1), memory)
        q_mean, k_mean = self.means(heads.split(q, heads.query), heads.split(k, heads.kv))
        width = heads.query * heads.dim
        q = heads.split(mixed[:, :width], heads.query) + q_mean
        k = heads.split(mixed[:, width:], heads.kv) + k_mean
        q, k = self.qk_norm(q, k)
        keys, values = memory[self.kind.name](at_positions(k), self.values(x, memory))
        mixed = attend(at_positions(q), keys, values, flow[self.kind.mask], heads)
        return self.o_proj(heads.merge(mixed))
