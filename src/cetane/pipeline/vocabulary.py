"""Which tokens a head needs: those of texts, those that the model itself chooses after them, and
those without which some texts could not be written."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference
from cetane.schema.subset import Counted, Ids, Subset, as_ranges

WINDOW = 256
"""Tokens that the model sees together."""
HELD_OUT = 10
"""Every so manyth window of a text is kept from choosing, unless there is a text for that."""
UNIT = 256
"""Rows that a head is rounded up to: 8 slices of whole palette groups."""
LONGEST = 1 << 26
"""Tokens of a text."""


@dataclass(frozen=True)
class Text:
    """A text, and what the model chooses after some of its tokens."""

    name: str
    sha256: str
    tokens: Ids
    choices: Ids

    def counted(self, tokens: Ids) -> Counted:
        """How much of it a subset covers."""
        return Counted(
            name=self.name,
            sha256=self.sha256,
            tokens=len(self.tokens),
            covered=int(np.isin(self.tokens, tokens).sum()),
            choices=len(self.choices),
            choices_covered=int(np.isin(self.choices, tokens).sum()),
        )


def read_text(tokenizer: Tokenizer, path: Path) -> Text:
    """The tokens of a file; CetaneError if it cannot be read or has fewer than two."""
    tokens = np.asarray(read_tokens(tokenizer, path, LONGEST), np.int64)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Text(path.name, digest, tokens, np.zeros(0, np.int64))


def split(text: Text) -> tuple[Text, Text]:
    """What to choose from, and what is held out, evenly from the whole text; CetaneError for one
    that is too short."""
    held = np.arange(len(text.tokens)) // WINDOW % HELD_OUT == HELD_OUT - 1
    if not held.any():
        raise CetaneError(
            f"{text.name}: fewer than {HELD_OUT * WINDOW} tokens, too few to hold some out",
            "give a longer text, or another one with --held-out",
        )
    return replace(text, tokens=text.tokens[~held]), replace(text, tokens=text.tokens[held])


def with_choices(
    texts: Sequence[Text], reference: Reference, count: int, progress: Progress
) -> list[Text]:
    """The texts with the model's greedy choices after about `count` of their tokens, in windows
    evenly from all of them."""
    windows = [
        (index, text.tokens[start : start + WINDOW])
        for index, text in enumerate(texts)
        for start in range(0, len(text.tokens), WINDOW)
    ]
    wanted = min(len(windows), -(-count // WINDOW))
    found: list[list[Ids]] = [[] for _ in texts]
    for done, at in enumerate(np.linspace(0, len(windows) - 1, wanted).round().astype(int)):
        progress(f"the model's choices on {len(texts)} texts", done, wanted)
        index, window = windows[at]
        found[index].append(reference.run([window.tolist()])[0].logits.argmax(1))
    empty = np.zeros(0, np.int64)
    return [
        replace(text, choices=np.concatenate([empty, *made]))
        for text, made in zip(texts, found, strict=True)
    ]


def ranked(texts: Sequence[Text], vocabulary: int, necessary: set[int]) -> Ids:
    """All tokens, those that are worth most first: the necessary ones, then by their share of the
    texts and of the choices together, then by id, which in most tokenizers is by frequency too."""
    worth = np.sum(shares(texts, vocabulary), axis=0)
    worth[[token for token in necessary if token < vocabulary]] = np.inf
    return np.argsort(-worth, kind="stable")


def shares(texts: Sequence[Text], vocabulary: int) -> list[np.ndarray]:
    """Every token's share of the texts, and of the choices where there are any."""
    streams = [
        np.concatenate([text.tokens for text in texts]),
        np.concatenate([text.choices for text in texts]),
    ]
    counts = [np.bincount(s, minlength=vocabulary)[:vocabulary] for s in streams if len(s)]
    return [count / count.sum() for count in counts]


def fewest(texts: Sequence[Text], order: Ids, necessary: int, coverage: float) -> int:
    """How many tokens of an order cover such a share of the texts, and of the choices."""
    reached = [np.cumsum(share[order]) for share in shares(texts, len(order))]
    needed = max(int(np.searchsorted(r, coverage - 1e-12)) + 1 for r in reached)
    return min(len(order), -(-max(necessary, needed) // UNIT) * UNIT)


def make_subset(
    order: Ids, size: int, tokenizer: Tokenizer, texts: Sequence[Text], held_out: Sequence[Text]
) -> Subset:
    """The first tokens of an order, with what they cover."""
    tokens = np.sort(order[:size])
    return Subset(
        vocabulary=len(order),
        tokens=as_ranges(tokens),
        tokenizer=tokenizer.digest,
        texts=tuple(text.counted(tokens) for text in texts),
        held_out=tuple(text.counted(tokens) for text in held_out),
    )
