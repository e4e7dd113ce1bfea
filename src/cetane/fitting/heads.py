"""Scores of key/value heads: how much a model needs each of them to see all tokens.

There are two scores. `mass_scores` measures the attention that answers put on the keys that they
repeat, in one pass for each text. `gate_scores` trains gates as DuoAttention does (arXiv
2410.10819): each head's output becomes `gate * full + (1 - gate) * near`. The gates learn to keep
the hidden states of the answers, and are charged for full attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cetane.checkpoint import SeenByHeads
from cetane.files import Progress
from cetane.fitting.pass_keys import PassKeys
from cetane.gates.reference import decoder_of
from cetane.gates.streaming import StreamingAttention, attending, everywhere, near
from cetane.hardware.quiet import quiet_transformers

CHARGE = 0.05
"""The charge for the mean gate, beside the answers' error: the paper's."""
RATE = 0.05
"""Adam's rate. The paper takes 0.02 and 2000 steps; the few steps here must reach zero too."""
PLAIN = StreamingAttention(SeenByHeads({}, 0, 1))
"""Attention in which every head sees all tokens."""
Scores = tuple[tuple[float, ...], ...]
"""A score for each head of each layer; none for a layer that cannot stream."""


@torch.no_grad()
def mass_scores(
    model: Any, layers: Mapping[int, int], texts: Sequence[PassKeys], progress: Progress
) -> Scores:
    """The share of attention that the tokens before an answer's digits put on the key's digits.

    It is the mean over answers, for the query head of each key/value head that puts most. `model`
    is a causal transformers model of any float type. `layers` maps each layer that can stream to
    the number of its key/value heads.
    """
    sums: dict[int, Tensor] = {}

    def noting(module: Any, q: Tensor, k: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, None]:
        if module.layer_idx in layers:
            scaling = rest[2] if len(rest) > 2 else more["scaling"]
            mass = on_keys(q, k, scaling, text)
            sums[module.layer_idx] = sums.get(module.layer_idx, 0) + mass
        return PLAIN(module, q, k, *rest, **more)

    with attending(model, noting):
        for number, text in enumerate(texts):
            progress("attention mass", number, len(texts))
            with quiet_transformers():
                model(torch.tensor([text.whole[0]]), use_cache=False, logits_to_keep=1)
    progress("attention mass", len(texts), len(texts))
    return by_layer(model, {layer: total / len(texts) for layer, total in sums.items()})


def on_keys(q: Tensor, k: Tensor, scaling: float, text: PassKeys) -> Tensor:
    """The attention of a layer's query heads on the digits that answers repeat: for each key/value
    head, that of the query head with most, `(KV,)`."""
    heads = k.shape[1]
    group, total = q.shape[1] // heads, torch.zeros(q.shape[1])
    for question, answer in zip(text.questions, text.whole[1], strict=True):
        asking = torch.arange(answer.start - 1, answer.stop - 1)
        seen = torch.arange(k.shape[2]) <= asking[:, None]
        repeated = k[0].repeat_interleave(group, 0)
        scores = q[0][:, asking].float() @ repeated.float().mT * scaling
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        digits = range(question.place.stop - len(question.answer), question.place.stop)
        total += weights[..., digits.start : digits.stop].sum(-1).mean(-1)
    return total.reshape(heads, group).amax(1) / len(text.questions)


def gate_scores(
    model: Any,
    layers: Mapping[int, int],
    texts: Sequence[PassKeys],
    sinks: int,
    window: int,
    progress: Progress,
) -> Scores:
    """Gates after one step on each text, each 0 to 1.

    The error is the mean square by which the answers' last hidden states differ from the plain
    model's, over the mean square of these. The charge is `CHARGE` times the mean of all gates.
    """
    gates = {layer: torch.ones(heads, requires_grad=True) for layer, heads in layers.items()}
    optimizer = torch.optim.Adam(list(gates.values()), RATE)

    def gated(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **more: Any
    ) -> tuple[Tensor, None]:
        gate = gates.get(module.layer_idx)
        if gate is None:
            return PLAIN(module, q, k, v, mask, scaling, **more)
        full, part = everywhere(q, k, v, scaling), near(q, k, v, scaling, sinks, window)
        factor = gate.repeat_interleave(q.shape[1] // k.shape[1])[:, None, None]
        return (part + factor * (full - part)).to(q.dtype).transpose(1, 2), None

    for number, text in enumerate(texts):
        progress("training the gates", number, len(texts))
        tokens, places = text.whole
        asking = [at - 1 for place in places for at in place]
        with torch.no_grad(), attending(model, PLAIN):
            wanted = hidden(model, tokens, asking)
        with torch.enable_grad(), attending(model, gated):
            found = hidden(model, tokens, asking)
        error = (found - wanted).square().mean() / wanted.square().mean()
        charge = torch.cat(list(gates.values())).mean()
        optimizer.zero_grad()
        (error + CHARGE * charge).backward()
        optimizer.step()
        with torch.no_grad():
            for gate in gates.values():
                gate.clamp_(0, 1)
    progress("training the gates", len(texts), len(texts))
    return by_layer(model, {layer: gate.detach() for layer, gate in gates.items()})


def hidden(model: Any, tokens: Sequence[int], at: Sequence[int]) -> Tensor:
    """The last hidden states of some tokens, `(n, C)`."""
    with quiet_transformers():
        states: Tensor = decoder_of(model)(
            torch.tensor([tokens]), use_cache=False
        ).last_hidden_state
    return states[0, at].float()


def by_layer(model: Any, scores: Mapping[int, Tensor]) -> Scores:
    """Scores of all layers of a model, rounded to the six digits of a file."""
    count = model.config.num_hidden_layers
    return tuple(
        tuple(round(float(score), 6) for score in scores.get(layer, ())) for layer in range(count)
    )
