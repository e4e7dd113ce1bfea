"""The host's tables: rows by token, and rotary cosines and sines by position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from cetane.errors import CetaneError

if TYPE_CHECKING:  # a bundle is opened without numpy
    import numpy as np


class TokenRows(Protocol):
    """A table with a row for each token, in memory or on disk."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __getitem__(self, tokens: Any, /) -> np.ndarray[Any, Any]: ...


@dataclass(frozen=True)
class Tables:
    """The host's tables, memory-mapped.

    `tokens (V, C)` is the embedding, None if a shard holds it. `rotary[name] (2, context, D)` is
    fp32. `others` are further tables with a row for each token.
    """

    tokens: TokenRows | None
    rotary: dict[str, np.ndarray[Any, Any]]
    others: dict[str, TokenRows] = field(default_factory=dict)

    @property
    def embedding(self) -> TokenRows:
        """Rows of the embedding; CetaneError if a shard holds it."""
        if self.tokens is None:
            raise CetaneError(
                "this bundle has no table of the embedding: its first shard holds it",
                "port without embedding.inside",
            )
        return self.tokens

    def rows(self, name: str) -> TokenRows:
        """A table by its name in the plan."""
        return self.embedding if name == "tokens" else self.others[name]
