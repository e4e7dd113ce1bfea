"""Grouped-query attention (arXiv 2305.13245): several query heads share a key/value head.

Keys and values may be whole numbers of 8 bits. Many of them are taken in blocks.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cetane.families.axes import Axes


@dataclass(frozen=True)
class AttentionHeads:
    """The numbers of query and key/value heads, their width, and the factor on their scores."""

    query: int
    kv: int
    dim: int
    scale: float
    block: int | None = None
    """The number of keys that attention takes at a time; None for all."""
    softcap: float | None = None
    """The bound c of scores, c * tanh(score / c); None for no bound."""
    values: int | None = None
    """The width of values; None for that of keys."""
    axes: Axes = field(default_factory=Axes)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Channels of a hidden tensor -> `(1, heads, D, T)`."""
        return x.reshape(1, heads, self.dim, -1)

    def merge(self, x: Tensor) -> Tensor:
        """`(1, H, D, T)` -> a hidden tensor."""
        return x.reshape(self.axes.shape(self.query * (self.values or self.dim), -1))

    def capped(self, scores: Tensor) -> Tensor:
        """Scores within the bound."""
        if self.softcap is None:
            return scores
        return torch.tanh(scores * (1 / self.softcap)) * self.softcap


def at_least(x: Tensor, least: float) -> Tensor:
    """The larger of x and a number. torch's clamp would become a clip up to infinity."""
    return torch.maximum(x, torch.full((1,), least, dtype=x.dtype))


@dataclass(frozen=True)
class Rounded:
    """Keys or values `(1, KV, D, S)` as whole numbers, with a scale for each token and head.

    An element is `code * scale / STEPS`. A scale is about an eighth of its column's largest
    magnitude, and a code is 127 at most. Queries are divided by `STEPS` before they meet codes, so
    their products stay inside fp16.
    """

    codes: Tensor
    """`(1, KV, D, S)`: whole numbers from -127 to 127, in a type of floats."""
    scales: Tensor
    """`(1, KV, 1, S)`: positive, in the same type."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, at: Any) -> "Rounded":
        """Some slots."""
        return Rounded(self.codes[at], self.scales[at])

    def widened(self) -> Tensor:
        """Keys or values as numbers, `(1, KV, D, S)`: codes times their scales."""
        return self.codes * (self.scales * (1 / STEPS))


STEPS = 16
"""The difference of two codes whose elements differ by one scale."""
UNIT_SCALE = 129 / 1024
"""The scale of a column whose largest magnitude is 1. It is exact in fp16, and near 16 / 127: the
largest element becomes 127.008, which rounds to the code 127."""
LEAST_SCALE = 2.0**-10
"""The least scale. A step of it is the least normal number of fp16."""
KeysOrValues = Tensor | Rounded
"""Keys or values `(1, KV, D, S)`: as they are, or rounded."""


def rounded(x: Tensor) -> Rounded:
    """Columns `(1, KV, D, T)` with 127 steps to the largest magnitude of each token and head."""
    scales = at_least(x.abs().amax(2, keepdim=True) * UNIT_SCALE, LEAST_SCALE)
    return Rounded(torch.round(x / scales * STEPS), scales)


LONGEST_BLOCK = 8192
"""The most keys that attention takes at a time if a family names no number, beside the keys of the
call's own tokens. Apple's own attention for the ANE takes as many (coreai-models,
primitives/ios/sdpa.py)."""
MOST_LIFT = 128.0
"""The largest factor of `lift`: that of the most keys."""


def attend(
    q: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    mask: Tensor,
    heads: AttentionHeads,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention. The query heads of one KV head are rows of one matrix product.

    `q (1, H, D, T)`, `k`, `v (1, KV, D, S)`, rounded or not, additive `mask (1, 1, G*T, S)` ->
    `(1, H, D, T)`.
    `sinks (1, KV, G, 1)` are scores of one more key for each query head, whose value is zero.
    """
    kv, groups, dim = heads.kv, heads.query // heads.kv, heads.dim
    rows = q.reshape(kv, groups, dim, -1).transpose(2, 3).reshape(1, kv, -1, dim)
    scale = heads.scale / STEPS if isinstance(k, Rounded) else heads.scale
    if scale != 1:
        rows = rows * scale
    width = heads.values or dim
    keys = int(k.shape[3])  # a trace's number, so the factor of a flexible shape is a constant too
    parts = blocks(keys, int(q.shape[3]), heads.block or LONGEST_BLOCK)
    if sinks is None and len(parts) > 1:
        mixed = attend_in_blocks(rows, k, v, mask, heads, parts)
    else:
        factor = lift(keys)
        scores = heads.capped(scored(rows, k)) + mask
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            column = sinks.expand(1, kv, groups, q.shape[3]).reshape(1, kv, -1, 1)
            weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        lifted = weights if factor == 1 else weights * factor
        mixed = mix(lifted, v, factor)
    return mixed.reshape(kv, groups, -1, width).transpose(2, 3).reshape(1, heads.query, width, -1)


def lift(keys: int) -> float:
    """The factor on softmax's weights of some keys: a power of two, so it is exact in fp32.

    An ANE counts products below 2**-14 as zero (`mil/ane.py`). The mean weight is 1 / keys: times
    the factor it is 1/128 to 1/64, for 64 to 16,384 keys. Published for 4,096 keys: an error of
    5.3 % without a factor, of 0.06 % with 64, which is the factor here
    (llms-on-apple-neural-engine, findings/attention-product-precision). Sums stay inside fp16
    for values up to 512.
    """
    return min(2.0 ** max((keys // 64).bit_length() - 1, 0), MOST_LIFT)


def scored(rows: Tensor, k: KeysOrValues) -> Tensor:
    """The scores `(1, KV, G*T, S)` of queries `rows (1, KV, G*T, D)` for keys `k (1, KV, D, S)`.

    Rounded keys enter as codes, and their scales multiply the scores: one multiplication for
    each score takes the place of one for each element. The caller has divided the rows by `STEPS`.
    """
    return (rows @ k.codes) * k.scales if isinstance(k, Rounded) else rows @ k


def mix(weights: Tensor, v: KeysOrValues, factor: float) -> Tensor:
    """`weights (..., S)`, lifted by a factor, times values `(..., D, S)`; without the factor.

    Scales of rounded values multiply weights. They are first divided by their mean, weighted as the
    values are. So weights keep their size, and the sum is at most 127 times the factor.
    """
    if not isinstance(v, Rounded):
        mixed = weights @ v.transpose(2, 3)
        return mixed if factor == 1 else mixed * (1 / factor)
    mean = at_least((weights @ v.scales.transpose(2, 3)) * (1 / factor), LEAST_SCALE)
    shares = weights * (v.scales / mean)
    return ((shares @ v.codes.transpose(2, 3)) * (1 / (STEPS * factor))) * mean


def blocks(keys: int, new: int, most: int) -> list[slice]:
    """Keys in blocks of `most`.

    The last `new` keys, those of the call's own tokens, join the block before them. So a cache of
    `most` slots is read whole, as a smaller one is.
    """
    starts = range(0, max(keys - new, 1), most)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], keys], strict=True)]


def attend_in_blocks(
    rows: Tensor,
    k: KeysOrValues,
    v: KeysOrValues,
    mask: Tensor,
    heads: AttentionHeads,
    parts: list[slice],
) -> Tensor:
    """Attention over some keys at a time; the results of these blocks are weighted as they come.

    The published ports call it "flash decoding" (arXiv 2307.08691). Here each block is normalised
    by itself, so nothing grows with the number of keys. Masks are finite, so a block of hidden keys
    has a maximum too. Its weight vanishes beside a visible key, so 0 / 0 never arises.
    """
    before: tuple[Tensor, Tensor, Tensor] | None = None
    for part in parts:
        scores = heads.capped(scored(rows, k[..., part])) + mask[..., part]
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        factor = lift(part.stop - part.start)
        # A number over a tensor becomes Core ML's inverse, which adds 1e-4 to the tensor.
        mixed = mix(weights * factor / total, v[..., part], factor)
        if before is not None:
            highest = torch.maximum(top, before[0])
            old, new = before[1] * torch.exp(before[0] - highest), total * torch.exp(top - highest)
            top, total = highest, old + new
            mixed = before[2] * (old / total) + mixed * (new / total)
        before = top, total, mixed
    return mixed
