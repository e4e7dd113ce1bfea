"""The tokens that the golden gate uses: seeded, recorded, and clear of known traps.

A BOS token first, or tokens with unusually small embeddings beside ordinary ones, exaggerate
quantisation error (ZAYA experiments 30 and 31 of ane-book); neither is used.
"""

from dataclasses import dataclass

import numpy as np

from cetane.bundle.tables import TokenRows
from cetane.checkpoint import Tokenizer

ROWS = 1 << 14
"""Of the embedding, in memory at a time."""
SMALL = 5.0
"""Percentile of embedding norms below which a token is not drawn."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish and German.",
)


@dataclass(frozen=True)
class Probe:
    """A sequence to run and compare."""

    name: str
    tokens: tuple[int, ...]


def random_probe(embedding: TokenRows, length: int, seed: int, excluded: set[int]) -> Probe:
    """Ordinary tokens drawn evenly; `embedding (V, C)`."""
    norms = np.concatenate(
        [
            np.linalg.norm(np.asarray(embedding[start : start + ROWS], dtype=np.float32), axis=1)
            for start in range(0, embedding.shape[0], ROWS)
        ]
    )
    usable = np.flatnonzero(norms >= np.percentile(norms, SMALL))
    usable = usable[~np.isin(usable, sorted(excluded))]
    drawn = np.random.default_rng(seed).choice(usable, length)
    return Probe(f"random-{seed}", tuple(int(token) for token in drawn))


def text_probe(tokenizer: Tokenizer, text: str, length: int) -> Probe:
    """A text, repeated until it is `length` tokens long, without special tokens before it."""
    tokens = tokenizer.encode(text)
    if tokenizer.bos_id is not None and tokens[:1] == [tokenizer.bos_id]:
        tokens = tokens[1:]
    repeated = tokens * (-(-length // len(tokens)))
    return Probe("text", tuple(repeated[:length]))


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Questions as the model is asked them."""
    return [asked(tokenizer, question) for question in QUESTIONS[:count]]


def asked(tokenizer: Tokenizer, question: str) -> list[int]:
    """A question by the model's chat template, else as plain text."""
    if tokenizer.has_chat_template:
        return tokenizer.chat([{"role": "user", "content": question}])
    return tokenizer.encode(question)
