"""A subset of the vocabulary for a smaller head, with its coverage of some texts.

Only the output projection has fewer rows. Embeddings and tokenizer stay whole, so the model reads
any prompt as before. The subset must hold every token without which some text cannot be written,
such as the single bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from cetane.errors import CetaneError
from cetane.files import read_named, write_json
from cetane.validation import Data, Sha256

if TYPE_CHECKING:  # a plan is read without numpy
    import numpy as np
    import numpy.typing as npt

    from cetane.checkpoint import Tokenizer

    Ids = npt.NDArray[np.int64]
    """Tokens, ascending."""

SUBSET = "subset.json"
"""The file of a subset beside a recipe that cetane writes: TOML is slow to read at its size."""
LARGEST_SUBSET = 1 << 24
"""Bytes."""
LARGEST_VOCABULARY = 1 << 22
"""Tokens; four times the largest tokenizer's."""


class TextCoverage(Data):
    """The tokens of a text, and how many of them a subset has.

    `choices` are the model's own greedy choices after some of the tokens.
    """

    name: str
    sha256: Sha256
    """Hash of the file."""
    tokens: int = Field(ge=0)
    covered: int = Field(ge=0)
    choices: int = Field(default=0, ge=0)
    choices_covered: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def consistent(self) -> TextCoverage:
        if self.covered > self.tokens or self.choices_covered > self.choices:
            raise ValueError("more is covered than there is")
        return self


class Subset(Data):
    """The tokens that a head can choose. `cetane vocabulary` makes one."""

    vocabulary: int = Field(ge=1, le=LARGEST_VOCABULARY)
    """Tokens of the model."""
    tokens: str = Field(max_length=LARGEST_SUBSET)
    """Ids in ascending order, as ranges: `0-258 261 300-302`."""
    tokenizer: Sha256
    """`Tokenizer.digest` of the tokenizer that has these ids."""
    texts: tuple[TextCoverage, ...]
    """The texts from which the tokens were chosen."""
    held_out: tuple[TextCoverage, ...]
    """Texts that had no part in the choice."""

    @model_validator(mode="after")
    def consistent(self) -> Subset:
        last = -1
        for first, end in ranges(self.tokens):
            if not last < first <= end < self.vocabulary:
                raise ValueError(f"tokens: {first}-{end} after {last}, of {self.vocabulary} tokens")
            last = end
        if last < 0:
            raise ValueError("tokens: there are none")
        return self

    @cached_property
    def ids(self) -> Ids:
        """The tokens, ascending. Row i of the head is the token `ids[i]`."""
        import numpy as np

        return np.concatenate([np.arange(a, b + 1) for a, b in ranges(self.tokens)])

    @property
    def missing(self) -> float:
        """The share of a new text's tokens that the subset is expected to lack.

        Estimated from the held-out texts by the rule of succession, so it is never zero.
        """
        tokens = sum(text.tokens for text in self.held_out)
        return (tokens - sum(text.covered for text in self.held_out) + 1) / (tokens + 2)

    def save(self, path: Path) -> None:
        """Write the file that `load_subset` reads."""
        write_json(path, self.model_dump(mode="json"))

    def check(self, tokenizer: Tokenizer) -> None:
        """Raise CetaneError if the ids are another tokenizer's, or if some text cannot be
        written."""
        hint = "cetane vocabulary makes one"
        if tokenizer.digest != self.tokenizer:
            raise CetaneError("head.subset was chosen for another tokenizer", hint)
        needed = {token for token in tokenizer.necessary() if token < self.vocabulary}
        lacking = sorted(needed - set(self.ids.tolist()))
        if lacking:
            text = tokenizer.backend.id_to_token(lacking[0])
            raise CetaneError(
                f"head.subset lacks {len(lacking)} tokens without which some texts cannot be "
                f"written, such as {lacking[0]} ({text!r})",
                hint,
            )


def ranges(tokens: str) -> Iterable[tuple[int, int]]:
    """The first and last id of every range. Raises ValueError for a part that is no range."""
    for part in tokens.split():
        first, dash, last = part.partition("-")
        if not (part.isascii() and first.isdigit() and (last.isdigit() if dash else not last)):
            raise ValueError(f"tokens: {part[:40]!r} is no range")
        yield int(first), int(last or first)


def as_ranges(ids: npt.NDArray[Any]) -> str:
    """Ascending ids, written as `Subset.tokens`."""
    import numpy as np

    cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1), len(ids)]
    parts = [(ids[a], ids[b - 1]) for a, b in pairwise(cuts)]
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def load_subset(path: Path) -> Subset:
    """Read a subset from its file. Raises CetaneError if the file holds none."""
    return read_named(Subset, path, LARGEST_SUBSET, "head.subset", "cetane vocabulary makes one")
