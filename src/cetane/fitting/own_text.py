"""Text that a model wrote itself: what its weights are fitted on.

The text is sampled from the model, so it shows what the model itself would say. It needs no
download, and holds no text on which a gate judges. Source: LLM-QAT, which calls this data-free
distillation (arXiv 2305.17888).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cetane.errors import CetaneError
from cetane.files import Progress, disk_errors, keep_tensors, kept_tensors

log = logging.getLogger("cetane.fitting")

SPREAD = 1 / 2
"""A sequence's second token is any of the likelier half of the vocabulary, so that texts differ.
With the likeliest 2,000 alone, four bits of SmolLM2 cost prose 10 % more KL: few texts were code,
or of other languages."""
LEAST = 0.05
"""A token is never drawn if it is less likely than this share of the likeliest one (min-p, arXiv
2407.01082). Otherwise small models write no words after some tens of tokens."""
BATCH = 128
"""The most sequences that a CPU writes side by side. A GPU writes all."""
FREE = -1
"""In place of a token that is not given, but drawn."""
TOKENS, RANDOM = "tokens", "random"
"""What is kept of a batch: its tokens, and the state of the random numbers after it."""


@dataclass(frozen=True)
class TextWriter:
    """A causal transformers model that writes text of its own."""

    model: Any
    start: int
    """The token that every other sequence begins with."""
    length: int
    """Tokens of a sequence."""
    openings: Sequence[Sequence[int]]
    """How some sequences go on."""
    progress: Progress

    def write(self, sequences: int, seed: int, place: Path) -> Tensor:
        """Sampled tokens, int64 `(sequences, length)`. The same seed gives the same text on one
        machine.

        Every other sequence begins with `start`. The others lack it, as texts without a template
        do: the first token of a text, whichever it is, draws much attention. The third and the
        fourth of every four go on with one of the openings, if there are any.

        The folder `place` keeps each batch of this text, and of no other one. A text that was
        interrupted goes on after them, and is the same.
        """
        random = torch.Generator().manual_seed(seed)
        parts = []
        for part in kept_batches(place):
            parts.append(part[TOKENS])
            random.set_state(part[RANDOM])
        first = sum(map(len, parts))
        if 0 < first < sequences:
            log.info(
                "the model wrote %d of %d sequences of its own text before: it goes on after them",
                first, sequences,
            )  # fmt: skip
        most = BATCH if self.model.device.type == "cpu" else sequences
        while first < sequences:
            self.progress("the model writes its own text", first, sequences)
            begun = self.beginnings(min(most, sequences - first), random)
            made = write_batch(self.model, begun, random)
            kept = {TOKENS: made, RANDOM: random.get_state()}
            with suppress(CetaneError), disk_errors(place):  # a cache may be full or locked
                keep_tensors(batch_of(place, len(parts)), kept)
            parts.append(made)
            first += len(made)
        self.progress("the model writes its own text", sequences, sequences)
        text = torch.cat(parts)[:sequences]  # a GPU's batches are larger
        return torch.where(torch.arange(sequences)[:, None] % 2 == 0, text[:, :-1], text[:, 1:])

    def beginnings(self, sequences: int, random: torch.Generator) -> Tensor:
        """The given tokens of a batch, int64 `(sequences, 1 + length)`, and `FREE` for all
        others."""
        tokens = torch.full((sequences, 1 + self.length), FREE)
        tokens[:, 0] = self.start
        if self.openings:
            chosen = torch.randint(0, len(self.openings), (sequences,), generator=random).tolist()
            for row in range(sequences):
                if row % 4 >= 2:
                    opening = torch.tensor(self.openings[chosen[row]][: self.length])
                    tokens[row, 1 : 1 + len(opening)] = opening
        return tokens


def kept_batches(place: Path) -> Iterator[dict[str, Tensor]]:
    """The first batches of a text that are kept whole."""
    for number in count():
        part = kept_tensors(batch_of(place, number))
        if part is None:
            return
        yield part


def batch_of(place: Path, number: int) -> Path:
    """The file of a batch."""
    return place / f"{number:03}.safetensors"


def drawn_from(logits: Tensor, random: torch.Generator) -> Tensor:
    """One index for each row of logits `(B, V)`, drawn by its probability, int64 `(B, 1)`.

    Tokens that are too unlikely (`LEAST`) are never drawn. With Gumbel's noise on the logits, a
    token is the largest as often as it is likely. So only the few tokens that can be drawn need a
    random number; `torch.multinomial` draws one for the whole vocabulary.
    """
    least = logits.amax(1, keepdim=True) + math.log(LEAST)
    rows, columns = (logits >= least).nonzero(as_tuple=True)
    # the few that remain are compared on the CPU, in float64, which not every GPU has
    likely, rows, columns = (one.cpu() for one in (logits[rows, columns], rows, columns))
    noise = torch.rand(len(rows), generator=random, dtype=torch.float64)
    scores = likely.double() - torch.log(-torch.log(noise))
    lowest = scores.new_full((len(logits),), -math.inf)
    best = lowest.scatter_reduce(0, rows, scores, "amax")
    drawn = columns.new_zeros(len(logits), 1)
    won = scores == best[rows]
    drawn[rows[won], 0] = columns[won]
    return drawn.to(logits.device)


@torch.no_grad()
def write_batch(model: Any, begun: Tensor, random: torch.Generator) -> Tensor:
    """`begun`, int64 `(sequences, length)`, with tokens of the model in place of `FREE`.

    Numbers are drawn on the CPU, for any device of the model.
    """
    from cetane.fitting.cache import extending, roomy_cache  # here: transformers takes a while

    given = begun.to(model.device)
    tokens = given.clone()
    cache = roomy_cache(model, tokens.shape[1])
    for at in range(1, tokens.shape[1]):
        read = tokens[:, at - 1 : at]
        made = model(read, **extending(model, cache), logits_to_keep=1)
        logits = made.logits[:, -1].float()
        if at == 1:
            likely = logits.topk(round(SPREAD * logits.shape[1])).indices
            ranks = torch.randint(0, likely.shape[1], (len(tokens), 1), generator=random)
            drawn = likely.gather(1, ranks.to(likely.device))
        else:
            drawn = drawn_from(logits, random)
        known = given[:, at : at + 1]
        tokens[:, at : at + 1] = torch.where(known == FREE, drawn, known)
    return tokens.cpu()
