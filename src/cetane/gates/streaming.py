"""Attention of the Hugging Face model in which some key/value heads stream: they see the first
tokens of a sequence, and the newest (arXiv 2410.10819).

A bundle with `cache.streaming` computes this attention, so it is the bundle's truth. Long texts are
judged with it too, since it never holds the scores of all queries and keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cetane.checkpoint import SeenByHeads
from cetane.errors import CetaneError
from cetane.files import json_sha256

BLOCK = 256
"""The queries that `near` computes together."""


class StreamingAttention:
    """An attention function for transformers in which each head sees what `seen` says."""

    def __init__(self, seen: SeenByHeads) -> None:
        self.seen = seen

    def __call__(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        scaling: float,
        sliding_window: int | None = None,
        position_ids: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """`q (B, H, T, D)` of the last T tokens, `k`, `v (B, KV, S, D)` -> `(B, T, H, D)`.

        `mask` is not used: what a token sees follows from the arguments and `seen`."""
        if position_ids is not None and len(starts := position_ids[:, 0].unique()) > 1:
            mixed = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1])
            for start in starts:  # rows that begin elsewhere have other sinks
                at = position_ids[:, 0] == start
                own = q[at], k[at], v[at], None, scaling, sliding_window, position_ids[at]
                mixed[at] = self(module, *own)[0]
            return mixed, None
        heads = k.shape[1]
        group, full = q.shape[1] // heads, self.seen.full.get(module.layer_idx)
        if sliding_window is not None:
            mixed = near(q, k, v, scaling, 0, sliding_window)
        elif full is None or len(full) == heads:
            mixed = everywhere(q, k, v, scaling)
        else:
            first = 0  # the position of the first key, which is no sink if a text begins later
            if position_ids is not None:
                first = int(position_ids[0, 0]) - (k.shape[2] - q.shape[2])
            sinks = max(0, self.seen.sinks - first)
            mixed = q.new_empty(*q.shape[:3], v.shape[-1])
            for head in range(heads):
                asking = slice(head * group, head * group + group)
                parts = q[:, asking], k[:, head : head + 1], v[:, head : head + 1]
                mixed[:, asking] = (
                    everywhere(*parts, scaling)
                    if head in full
                    else near(*parts, scaling, sinks, self.seen.window)
                )
        return mixed.transpose(1, 2), None


def everywhere(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Each token sees itself and all before it.

    `q (B, H, T, D)`, `k`, `v (B, KV, S, D)` -> `(B, H, T, D)`."""
    new, known = q.shape[2], k.shape[2]
    seen = None
    if new < known:
        seen = torch.ones(new, known, dtype=torch.bool, device=q.device).tril(known - new)
    return scaled_dot_product_attention(
        q, k, v, seen, is_causal=seen is None, scale=scaling, enable_gqa=True
    )


def near(q: Tensor, k: Tensor, v: Tensor, scaling: float, sinks: int, window: int) -> Tensor:
    """Each token sees the first `sinks` tokens and the last `window`, itself included.

    Shapes as in `everywhere`."""
    new, known = q.shape[2], k.shape[2]
    parts = []
    for start in range(known - new, known, BLOCK):
        stop = min(start + BLOCK, known)
        first = max(0, start - window + 1)
        at = torch.cat([torch.arange(min(sinks, first)), torch.arange(first, stop)]).to(q.device)
        query = torch.arange(start, stop, device=q.device)[:, None]
        seen = (at <= query) & ((query - at < window) | (at < sinks))
        rows = q[:, :, start - (known - new) : stop - (known - new)]
        parts.append(
            scaled_dot_product_attention(
                rows, k[:, :, at], v[:, :, at], seen, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(parts, dim=2)


def attend_by(model: Any, attention: Any, name: str) -> None:
    """Let a transformers model attend by a function, which transformers registers under a name.

    Raises CetaneError for a gemma2, whose scores have a bound, and for the types whose scores have
    sinks: `attention` computes plain scores.
    """
    from transformers import AttentionInterface

    kind = model.config.model_type
    if kind in ("gemma2", "gpt_oss", "granite_swa", "granitemoe_swa"):
        raise CetaneError(
            f"heads of a {kind} cannot stream: its attention scores are not plain",
            "let all heads of this model see all tokens",
        )
    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)


def let_stream(model: Any, seen: SeenByHeads) -> str:
    """Let a transformers model's heads see only what `seen` says. The result is the name of the
    attention that it had before."""
    before: str = model.config._attn_implementation
    key = json_sha256([sorted(seen.full.items()), seen.sinks, seen.window])
    attend_by(model, StreamingAttention(seen), f"cetane_{key[:16]}")
    return before


@contextmanager
def attending(model: Any, attention: Any) -> Iterator[None]:
    """Let a transformers model attend by a function for a time."""
    before = model.config._attn_implementation
    attend_by(model, attention, "cetane_for_a_time")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
