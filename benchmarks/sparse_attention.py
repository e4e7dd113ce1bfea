"""What a small part of the keys costs, by who chooses it: Quest's pages by this step's query, the
same one step stale, as a host has it between two calls; TriForce's chunks, chosen once after the
prompt; and sinks with the newest tokens.

    python benchmarks/sparse_attention.py MODEL [--length 1536] [--budgets 128 256 512]

The first part of a text is a prompt with full attention; the last 256 tokens read only `budget`
keys in all layers but the first two. Of two texts, one is documentation. The other ends with its
own beginning, so that the next token stands far away. Choices are made for each key/value head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from cetane.checkpoint import open_checkpoint
from cetane.gates.reference import Reference
from common import arguments, report, standard_library_text

PAGE, CHUNK, SINKS, FULL, DECODED = 16, 8, 16, 2, 256
"""Tokens of Quest's pages and TriForce's chunks, sinks, layers with all keys, decoded tokens."""
Chooser = Callable[[Tensor, Tensor, int, int], Tensor]
"""From queries `(KV, group, T, D)` and keys `(KV, T, D)`, the first decoded row and the budget: the
keys that each decoded row reads, bool `(KV, DECODED, T)`."""


def pages(query: Tensor, key: Tensor, start: int, budget: int, late: int) -> Tensor:
    """Quest: the pages with the largest bound on a product with the query of `late` rows before."""
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
    """TriForce: chunks of the prompt by their mean key and the prompt's last query; all after."""
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


CHOOSERS: dict[str, Chooser] = {
    "Quest, this step's query": partial(pages, late=0),
    "Quest, one step stale": partial(pages, late=1),
    "TriForce, once": once,
    "sinks and newest": newest,
}


@dataclass
class Sparse:
    """The attention of one run; None is full attention."""

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


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--length", type=int, default=1536)
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 256, 512])
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    model = Reference(checkpoint).model
    ids = checkpoint.tokenizer.encode(
        standard_library_text().read_text("utf-8")[: 8 * options.length]
    )
    known = ids[: options.length - DECODED]
    texts = {"documentation": ids[: options.length], "its own beginning": known + known[:DECODED]}
    rows = []
    for name, text in texts.items():
        full = run(model, text, Sparse())
        target = torch.tensor(text[1:])[-DECODED + 1 :]
        rows.append([name, "all keys", options.length, *against(full, full, target), 1.0])
        for budget in options.budgets:
            for chooser, function in CHOOSERS.items():
                sparse = Sparse(function, budget)
                figures = against(run(model, text, sparse), full, target)
                rows.append([name, chooser, budget, *figures, sum(sparse.mass) / len(sparse.mass)])
                print(rows[-1], flush=True)
    columns = ["text", "keys", "budget", "perplexity", "KL", "same token", "attention kept"]
    report("sparse attention", columns, [[*r[:3], *(f"{x:.3f}" for x in r[3:])] for r in rows],
           {"rows": rows}, options.json)  # fmt: skip


@torch.inference_mode()
def run(model: Any, text: list[int], attention: Sparse) -> Tensor:
    """Log-probabilities of the decoded rows."""
    AttentionInterface.register("sparse", attention)
    model.set_attn_implementation("sparse")
    logits = model(torch.tensor([text]), use_cache=False, logits_to_keep=DECODED).logits[0]
    return logits.float().log_softmax(-1)


def against(found: Tensor, full: Tensor, target: Tensor) -> tuple[float, float, float]:
    """Perplexity, divergence from full attention, and the share of equal choices."""
    loss = -found[:-1].gather(1, target[:, None]).mean()
    kl = (full.exp() * (full - found)).sum(-1).mean()
    same = (found.argmax(-1) == full.argmax(-1)).float().mean()
    return math.exp(float(loss)), float(kl), float(same)


if __name__ == "__main__":
    main()
