"""Multi-head latent attention (arXiv 2405.04434), absorbed: keys and values are never made.

The cache holds a latent and one rotary key for each token, for all heads together. Queries are
taken to the latent, and sums of latents to the heads' values.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from cetane.families.base import Flow, Memory
from cetane.families.blocks import Mixer
from cetane.families.grouped_query import attend
from cetane.families.kinds import LayerKind
from cetane.families.layers import HeadPick, Leaf, Pick, Projection, RMSNorm, RowPick
from cetane.families.rotary import to_halves

LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, whatever the config says of others."""


@dataclass(frozen=True)
class LatentSizes:
    """The channels of latents, of rotary and plain queries, and of values; with a latent of queries
    where those have one."""

    rank: int
    rotary: int
    plain: int
    values: int
    queries: int | None = None


class PerHead(Leaf):
    """A linear layer for each attention head, as a convolution in groups."""

    weight: Tensor

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.heads = heads
        self.hold("weight", (heads * outputs, inputs, 1, 1), kind="attention")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, groups=self.heads)


class LatentAttention(Mixer):
    """Attention on a latent."""

    def __init__(
        self,
        size: int,
        sizes: LatentSizes,
        kind: LayerKind,
        bias: bool,
        factor: float,
        interleaved: bool = True,
    ) -> None:
        """`factor` multiplies its output. `interleaved` says whether the checkpoint pairs
        neighbouring channels (0, 1), (2, 3) ... of a head, not those of its two halves."""
        super().__init__()
        self.kind, self.heads, self.sizes = kind, kind.heads, sizes
        self.halves: Pick = to_halves if interleaved else as_stored
        self.reads, self.keeps = kind.reads, (kind.name,)
        count = self.heads.query
        width = count * (sizes.plain + sizes.rotary)
        if sizes.queries is None:
            self.q_proj = Projection(size, width, "attention")
        else:
            self.q_a_proj = Projection(size, sizes.queries, "attention", bias)
            self.q_a_layernorm = RMSNorm(sizes.queries, LATENT_EPS)
            self.q_b_proj = Projection(sizes.queries, width, "attention")
        self.kv_a_proj_with_mqa = Projection(size, sizes.rank + sizes.rotary, "attention", bias)
        self.kv_a_layernorm = RMSNorm(sizes.rank, LATENT_EPS)
        self.to_latent = PerHead(count, sizes.plain, sizes.rank)
        self.from_latent = PerHead(count, sizes.rank, sizes.values)
        self.o_proj = Projection(count * sizes.values, size, "attention", bias, factor)

    def queries(self, x: Tensor) -> Tensor:
        if self.sizes.queries is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        heads, sizes, at_positions = self.heads, self.sizes, self.kind.at_positions(flow)
        count, q = heads.query, self.queries(x)
        plain, rotary = q[:, : count * sizes.plain], q[:, count * sizes.plain :]
        rotary = at_positions(rotary.reshape(1, count, sizes.rotary, -1))
        latent = self.to_latent(plain).reshape(1, count, sizes.rank, -1)
        compressed = self.kv_a_proj_with_mqa(x)
        own = self.kv_a_layernorm(compressed[:, : sizes.rank]).reshape(1, 1, sizes.rank, -1)
        key = compressed[:, sizes.rank :].reshape(1, 1, sizes.rotary, -1)
        own = torch.cat([own, at_positions(key)], dim=2)
        # The two tensors of a cache hold the two halves, so nothing is kept twice.
        half = (sizes.rank + sizes.rotary) // 2
        keys = torch.cat(memory[self.kind.name](own[:, :, :half], own[:, :, half:]), dim=2)
        asked = torch.cat([latent, rotary], dim=2)
        mixed = attend(asked, keys, keys[:, :, : sizes.rank], flow[self.kind.mask], heads)
        return self.o_proj(self.from_latent(heads.merge(mixed)))

    def picks(self) -> dict[str, Pick]:
        """The functions that make its parameters from a checkpoint's tensors, by module path."""
        made, rank = (self.heads.query, self.sizes.plain), self.sizes.rank
        return {
            "q_proj": RowPick(partial(queries, *made, self.halves)),
            "q_b_proj": RowPick(partial(queries, *made, self.halves)),
            "kv_a_proj_with_mqa": RowPick(partial(latent_and_key, rank, self.halves)),
            "to_latent": HeadPick(*made),
            "from_latent": RowPick(partial(towards_values, *made)),
        }


def as_stored(rows: Tensor) -> Tensor:
    """Rows `(..., P, C)` whose rotary pairs lie in two halves already."""
    return rows


def queries(heads: int, plain: int, halves: Pick, stored: Tensor) -> Tensor:
    """The plain rows of all heads, then their rotary ones; `halves` orders a head's."""
    rows = stored.unflatten(0, (heads, -1))
    return torch.cat([rows[:, :plain].flatten(0, 1), halves(rows[:, plain:]).flatten(0, 1)])


def latent_and_key(rank: int, halves: Pick, stored: Tensor) -> Tensor:
    """The rows of the latent, then those of the rotary key; of a weight or a bias."""
    rows = stored.reshape(len(stored), -1)
    return torch.cat([rows[:rank], halves(rows[rank:])]).reshape(stored.shape)


def towards_values(heads: int, plain: int, stored: Tensor) -> Tensor:
    """The rows that make values."""
    return stored.unflatten(0, (heads, -1))[:, plain:].flatten(0, 1)
