"""Texts that hide pass keys, and how many of them a model finds.

Each key has a name, and lies in its own stretch of a text about other things. After the text,
questions ask for the keys by name. A key is found if all its digits are the model's greedy choices.
DuoAttention trains and judges its heads with such texts (arXiv 2410.10819).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.hardware.quiet import quiet_transformers

NAMES = (
    "Paris", "London", "Tokyo", "Cairo", "Lima", "Oslo", "Rome", "Delhi", "Sydney", "Berlin",
    "Madrid", "Dublin", "Vienna", "Athens", "Moscow", "Havana", "Boston", "Dallas", "Denver",
    "Prague",
)  # fmt: skip
DIGITS = 5
"""Digits of a key."""
EDGE = 0.03
"""The share of a stretch at its start, and at its end, in which its key does not lie."""


@dataclass(frozen=True)
class Question:
    """A question about one key of a text."""

    asked: tuple[int, ...]
    """Its tokens, up to the answer."""
    answer: tuple[int, ...]
    """The tokens of the digits."""
    place: range
    """The tokens of the text that tell the key; the last are the answer."""


@dataclass(frozen=True)
class PassKeys:
    """A text with pass keys, and a question for each."""

    text: tuple[int, ...]
    questions: tuple[Question, ...]

    @property
    def whole(self) -> tuple[list[int], list[range]]:
        """The text with all questions and answers after it, and the places of the answers."""
        tokens, places = list(self.text), []
        for question in self.questions:
            tokens += question.asked
            places.append(range(len(tokens), len(tokens) + len(question.answer)))
            tokens += question.answer
        return tokens, places


def hide(
    tokenizer: Tokenizer,
    haystack: Sequence[int],
    tokens: int,
    seed: int,
    keys: int = 1,
    depth: float | None = None,
    hint: str = "ask for longer texts (--tokens), or for fewer keys (--keys)",
) -> PassKeys:
    """A text with pass keys, which takes `tokens` tokens with its questions and answers.

    `haystack` are tokens of some text without a start token. `seed` chooses a part of it, the names
    and the numbers. It also chooses one place for all keys: the part of a stretch before its key.
    `depth`, 0 to 1, is that place instead. There are 20 `keys` at most. Raises CetaneError with
    `hint` for keys that leave no room for other text.
    """
    random = np.random.default_rng(seed)
    said = told_keys(tokenizer, keys, random)
    text, stop, places = start_tokens(tokenizer), tokenizer.encode_plain(".\n"), []
    spent = len(text) + sum(2 * len(lead) + 2 * len(key) + len(stop) for lead, key in said)
    room = tokens - spent
    if room < keys:
        raise CetaneError(
            f"{keys} pass keys and the questions about them take {spent} tokens, of {tokens}", hint
        )
    first = int(random.integers(0, max(len(haystack) - room, 1)))
    hay = list(islice(cycle(haystack), first, first + room))
    at, inside = 0, random.uniform(EDGE, 1 - EDGE) if depth is None else depth
    for number, (lead, key) in enumerate(said):
        to = int((number + inside) / keys * len(hay))
        text += hay[at:to]
        places.append(range(len(text), len(text) + len(lead) + len(key)))
        text += [*lead, *key, *stop]
        at = to
    questions = (
        Question(tuple(lead), tuple(key), place)
        for (lead, key), place in zip(said, places, strict=True)
    )
    return PassKeys((*text, *hay[at:]), tuple(questions))


def told_keys(
    tokenizer: Tokenizer, count: int, random: np.random.Generator
) -> list[tuple[list[int], list[int]]]:
    """Keys with their names, drawn at random: the tokens that lead to each, and its digits."""
    plain, names = tokenizer.encode_plain, random.permutation(NAMES)[:count]
    keys = random.integers(0, 10, (count, DIGITS))
    return [
        (plain(f"\nThe pass key of {name} is"), plain(f" {''.join(map(str, digits))}"))
        for name, digits in zip(names, keys, strict=True)
    ]


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that a text begins with."""
    return tokenizer.encode("")[:1]


@torch.inference_mode()
def found(model: Any, keys: PassKeys) -> list[bool]:
    """Whether a transformers model finds each key, whichever way it attends.

    The text is read once: each question goes on from a copy of the cache, since not all layers can
    forget tokens.
    """
    from transformers import DynamicCache

    from cetane.fitting.cache import extending

    read = DynamicCache(config=model.config)
    with quiet_transformers():
        model(torch.tensor([keys.text]), **extending(model, read), logits_to_keep=1)
    right = []
    for question in keys.questions:
        tokens = torch.tensor([[*question.asked, *question.answer[:-1]]])
        with quiet_transformers():
            made = model(
                tokens, **extending(model, deepcopy(read)), logits_to_keep=len(question.answer)
            )
        best: Tensor = made.logits[0].argmax(-1)
        right.append(best.tolist() == list(question.answer))
    return right
