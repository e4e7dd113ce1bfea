"""Attention in which decoded tokens read a small part of the keys, chosen in one of four ways.

Quest chooses pages by this step's query (arXiv 2406.10774). A stale Quest has the query of the step
before, as a host has it between two calls. TriForce chooses chunks once, after the prompt (arXiv
2404.11912). The last way takes sinks and the newest tokens. Each key/value head has its own choice.
The first two layers read all keys.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cetane.errors import CetaneError
from cetane.gates.streaming import attending
from cetane.lab.experiment import Keys

PAGE, CHUNK, SINKS, FULL, DECODED = 16, 8, 16, 2, 256
"""Tokens of Quest's pages, tokens of TriForce's chunks, sinks, first layers with all keys, and
decoded tokens."""
Chooser = Callable[[Tensor, Tensor, int, int], Tensor]
"""The keys that each decoded row reads, bool `(KV, DECODED, T)`. Its arguments: queries
`(KV, group, T, D)`, keys `(KV, T, D)`, the first decoded row and the budget."""


def pages(query: Tensor, key: Tensor, start: int, budget: int, late: int) -> Tensor:
    """Quest: the pages with the largest bound on a key's product with the query of `late` rows
    before."""
    heads, length, width = key.shape
    paged = key[:, : length // PAGE * PAGE].reshape(heads, -1, PAGE, width)
    low, high = paged.amin(2), paged.amax(2)
    asked = query[:, :, start - late : length - late]
    scores = asked.clamp(min=0) @ high[:, None].mT + asked.clamp(max=0) @ low[:, None].mT
    rows = torch.arange(start, length)
    open_ = rows[:, None] // PAGE - 1  # this page and the one before are always read
    later = torch.arange(low.shape[1]) >= open_
    best = scores.amax(1).masked_fill(later, -torch.inf)
    kept = best.topk(budget // PAGE - 2, -1).indices
    chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, kept, True) & ~later
    newest = torch.arange(length) >= open_ * PAGE
    seen = torch.zeros(heads, DECODED, length, dtype=torch.bool)
    seen[:, :, : low.shape[1] * PAGE] = chosen.repeat_interleave(PAGE, -1)
    return seen | newest


def once(query: Tensor, key: Tensor, start: int, budget: int) -> Tensor:
    """TriForce: chunks of the prompt by their mean key and the prompt's last query, and all tokens
    after the prompt."""
    heads, length, width = key.shape
    means = key[:, : start // CHUNK * CHUNK].reshape(heads, -1, CHUNK, width).mean(2)
    scores = (query[:, :, start - 1] @ means.mT).amax(1)
    scores[:, 0] = torch.inf
    kept = scores.topk(budget // CHUNK, -1).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, kept, True)
    seen = torch.arange(length).ge(start // CHUNK * CHUNK).repeat(heads, 1)
    seen[:, : means.shape[1] * CHUNK] |= chosen.repeat_interleave(CHUNK, -1)
    return seen[:, None].expand(-1, DECODED, -1)


def newest(query: Tensor, key: Tensor, start: int, budget: int) -> Tensor:
    """Sinks, and the tokens just before each row."""
    heads, length, _ = key.shape
    at = torch.arange(length)
    seen = (at < SINKS) | (at > torch.arange(start, length)[:, None] - (budget - SINKS))
    return seen.expand(heads, -1, -1)


CHOOSERS: dict[Keys, Chooser] = {
    "quest": partial(pages, late=0),
    "quest-stale": partial(pages, late=1),
    "triforce": once,
    "newest": newest,
}


@dataclass
class Sparse:
    """The attention of one run; without a `chooser`, full attention."""

    chooser: Chooser | None = None
    budget: int = 0
    mass: list[float] = field(default_factory=list)
    """The share of full attention on the keys that are read, by layer."""

    def __call__(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        length, heads = q.shape[2], k.shape[1]
        query = q[0].reshape(heads, -1, length, q.shape[-1])
        scores = query @ k[0][:, None].mT * scaling
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
        weights = scores.softmax(-1)
        if self.chooser is not None and module.layer_idx >= FULL:
            start = length - DECODED
            seen = self.chooser(query, k[0], start, self.budget)[:, None]
            kept = weights[:, :, start:] * seen
            total = kept.sum(-1, keepdim=True)
            self.mass.append(float(total.mean()))
            weights[:, :, start:] = kept / total
        mixed = weights @ v[0][:, None]
        return mixed.reshape(1, -1, length, v.shape[-1]).transpose(1, 2), None


@torch.inference_mode()
def run(model: Any, text: list[int], attention: Sparse) -> Tensor:
    """Log-probabilities of the decoded rows, fp32 `(DECODED, V)`."""
    with attending(model, attention):
        logits = model(torch.tensor([text]), use_cache=False, logits_to_keep=DECODED).logits[0]
    return logits.float().log_softmax(-1)


def both_texts(ids: list[int], length: int) -> dict[str, list[int]]:
    """A text of `length` tokens, and one that ends with its own beginning, so that what comes next
    stands far away. CetaneError for fewer tokens than are decoded twice."""
    if length < 2 * DECODED:
        raise CetaneError(
            f"{length} tokens are too few: the last {DECODED} are decoded, and come twice",
            f"workload.tokens = {2 * DECODED}",
        )
    known = ids[: length - DECODED]
    return {"": ids[:length], "copying": known + known[:DECODED]}


def against(found: Tensor, full: Tensor, target: Tensor) -> tuple[float, float, float]:
    """Perplexity, KL from full attention in nats, and the share of equal choices.

    `target` has the token after each decoded row but the last.
    """
    loss = -found[:-1].gather(1, target[:, None]).mean()
    kl = (full.exp() * (full - found)).sum(-1).mean()
    same = (found.argmax(-1) == full.argmax(-1)).float().mean()
    return math.exp(float(loss)), float(kl), float(same)
