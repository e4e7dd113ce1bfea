"""A head for a part of the vocabulary: its tokens, and how much of which texts they cover.

Embeddings and tokenizer stay whole, so any prompt is read as before; only the output projection
has fewer rows. What a tokenizer needs to write any text at all must be among them.
"""

from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from cetane.errors import CetaneError
from cetane.files import read_bytes
from cetane.validation import Data, parse_json, validated

if TYPE_CHECKING:
    from cetane.checkpoint import Tokenizer

LARGEST_FILE = 1 << 24
LARGEST_VOCABULARY = 1 << 22
"""Four times that of any tokenizer."""

Ids = npt.NDArray[np.int64]
"""Tokens, ascending."""
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Counted(Data):
    """A text: its tokens, and the model's own greedy choices after some of them; how many of each
    are in the subset."""

    name: str
    sha256: Sha256
    """Of the file."""
    tokens: int = Field(ge=0)
    covered: int = Field(ge=0)
    choices: int = Field(default=0, ge=0)
    choices_covered: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def consistent(self) -> "Counted":
        if self.covered > self.tokens or self.choices_covered > self.choices:
            raise ValueError("more is covered than there is")
        return self


class Subset(Data):
    """The tokens that a head can choose. `cetane vocabulary` makes one."""

    vocabulary: int = Field(ge=1, le=LARGEST_VOCABULARY)
    """Tokens of the model."""
    tokens: str = Field(max_length=LARGEST_FILE)
    """Ids in ascending order, as ranges: `0-258 261 300-302`."""
    tokenizer: Sha256
    """`Tokenizer.digest` of the tokenizer whose ids these are."""
    texts: tuple[Counted, ...]
    """What the tokens were chosen from."""
    held_out: tuple[Counted, ...]
    """What had no part in the choice."""

    @model_validator(mode="after")
    def consistent(self) -> "Subset":
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
        """The tokens, ascending: the head's row i is about the token `ids[i]`."""
        return np.concatenate([np.arange(a, b + 1) for a, b in ranges(self.tokens)])

    @property
    def missing(self) -> float:
        """The share of tokens that a subset like this one is expected to lack: of the text that had
        no part in the choice, by the rule of succession, so never zero."""
        tokens = sum(text.tokens for text in self.held_out)
        return (tokens - sum(text.covered for text in self.held_out) + 1) / (tokens + 2)

    def check(self, tokenizer: "Tokenizer") -> None:
        """CetaneError unless the tokens are this tokenizer's, and any text can be written."""
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
    """The first and last id of every range; ValueError for what is no range."""
    for part in tokens.split():
        first, dash, last = part.partition("-")
        if not (part.isascii() and first.isdigit() and (last.isdigit() if dash else not last)):
            raise ValueError(f"tokens: {part[:40]!r} is no range")
        yield int(first), int(last or first)


def as_ranges(ids: npt.NDArray[Any]) -> str:
    """Ascending ids as `Subset.tokens`."""
    cuts = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1), len(ids)]
    parts = [(ids[a], ids[b - 1]) for a, b in pairwise(cuts)]
    return " ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def load_subset(path: Path) -> Subset:
    """A subset from its file; CetaneError if it is not one."""
    hint = "cetane vocabulary makes one"
    try:
        content = read_bytes(path, LARGEST_FILE)
    except CetaneError as error:
        raise CetaneError(f"head.subset: {error.message}", hint) from error
    return validated(Subset, parse_json(content, str(path), hint), str(path))
