"""Conversations that a model writes itself, in its chat format: what its draft heads learn from.

A model that was trained to answer also writes questions, if it is given only the beginning of a
user's turn (Magpie, arXiv 2406.08464). So no list limits the text. Answers are greedy, as are those
that a draft head will draft.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from cetane.checkpoint import Tokenizer
from cetane.engine.prefixes import common_start
from cetane.fitting.cache import extending, roomy_cache
from cetane.fitting.openings import questions
from cetane.fitting.own_text import drawn_from
from cetane.gates.probes import asked


@dataclass(frozen=True)
class Writing:
    """How a model writes conversations."""

    question: int = 96
    """The most tokens of a question."""
    answer: int = 160
    """The most tokens of an answer. In longer ones small models repeat themselves."""
    listed: int = 2
    """One conversation in this number begins with a listed question, the others with the model's
    own."""


@dataclass(frozen=True)
class ChatTurn:
    """The tokens that a chat template puts around a user's words."""

    before: list[int]
    after: list[int]
    """The tokens between the user's words and the answer. The first of them ends the question."""


def turn_of(tokenizer: Tokenizer) -> ChatTurn | None:
    """The turn of a tokenizer's chat template. None without a template, or if no special token ends
    its questions: then nothing tells where a written question ends."""
    if not tokenizer.has_chat_template:
        return None
    one, other = asked(tokenizer, "apple"), asked(tokenizer, "Why?")
    before = one[: common_start(one, other)]
    ends = (text[: len(before) - 1 : -1] for text in (one, other))
    after = one[len(one) - common_start(*ends) :]
    if not after or tokenizer.decode(after[:1], skip_special_tokens=True):
        return None
    return ChatTurn(before, after)


class ConversationWriter:
    """One sequence in which a model writes conversations, one after the other."""

    def __init__(
        self,
        turn: ChatTurn | None,
        prompts: Iterator[Sequence[int]],
        ends: Sequence[int],
        writing: Writing = Writing(),
    ) -> None:
        """`prompts` gives questions in the template, without end. With a turn, the model writes
        the other questions itself. `ends` are its stop tokens."""
        self.turn, self.prompts, self.ends, self.writing = turn, prompts, ends, writing
        self.conversations = 0
        self.begin()

    def begin(self) -> None:
        """Begin a conversation."""
        own = self.conversations % self.writing.listed != self.writing.listed - 1
        self.asking = self.turn is not None and own
        begun = self.turn.before if self.turn and self.asking else next(self.prompts)
        self.given, self.said = deque(begun), 0
        self.conversations += 1

    @property
    def draws(self) -> bool:
        """Whether its next token is drawn at random, so that questions differ."""
        return self.asking and not self.given

    def next(self, likeliest: int, drawn: int) -> int:
        """Its next token: one that is given, the model's likeliest, or one drawn from the model's
        distribution."""
        if self.given:
            return self.given.popleft()
        self.said += 1
        if not self.asking:
            if likeliest in self.ends or self.said == self.writing.answer:
                self.begin()
            return likeliest
        assert self.turn is not None
        if drawn != self.turn.after[0] and self.said < self.writing.question:
            return drawn
        self.asking, self.said, self.given = False, 0, deque(self.turn.after)
        return self.given.popleft()


@torch.no_grad()
def write_conversations(
    model: Any,
    tokenizer: Tokenizer,
    sequences: int,
    length: int,
    seed: int,
    writing: Writing = Writing(),
) -> Tensor:
    """Conversations, int64 `(sequences, length)`, written side by side.

    The last conversation of each sequence is cut off.

    `model` is a causal transformers model. The same seed gives the same text on one machine.
    """
    draw, turn = torch.Generator().manual_seed(seed), turn_of(tokenizer)
    every = questions()
    start = seed * sequences % len(every)
    prompts = (asked(tokenizer, question) for question in cycle(every[start:] + every[:start]))
    writers = [
        ConversationWriter(turn, prompts, tokenizer.eos_ids, writing) for _ in range(sequences)
    ]
    tokens = torch.tensor([[writer.next(0, 0)] for writer in writers])
    cache, read = roomy_cache(model, length), tokens
    while tokens.shape[1] < length:
        made = model(read.to(model.device), **extending(model, cache), logits_to_keep=1)
        logits: Tensor = made.logits[:, -1]
        likeliest = logits.argmax(-1)
        drawn = likeliest.clone()
        if rows := [row for row, writer in enumerate(writers) if writer.draws]:
            drawn[rows] = drawn_from(logits[rows].float(), draw)[:, 0]
        pairs = zip(writers, likeliest.tolist(), drawn.tolist(), strict=True)
        read = torch.tensor([[writer.next(*both)] for writer, *both in pairs])
        tokens = torch.cat([tokens, read], 1)
    return tokens
