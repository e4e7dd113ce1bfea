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


class QuantizedRows:
    """int8 rows `(V, C)`, each with an fp16 scale: row = values * scale / 127."""

    def __init__(self, values: np.ndarray[Any, Any], scales: np.ndarray[Any, Any]) -> None:
        self.values, self.scales = values, scales

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, tokens: Any) -> np.ndarray[Any, Any]:
        """fp32 rows of some tokens."""
        import numpy as np

        scales = np.asarray(self.scales[tokens], np.float32) / 127
        rows: np.ndarray[Any, Any] = self.values[tokens] * scales[..., None]
        return rows


def quantize_rows(
    rows: np.ndarray[Any, Any],
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """int8 values, and an fp16 scale for each row: its largest magnitude, as in CoreML-LLM."""
    import numpy as np

    scales = np.abs(rows).max(axis=-1).astype(np.float16)
    steps = np.where(scales == 0, 1, scales).astype(np.float32)[:, None] / 127
    return np.clip(np.rint(rows / steps), -127, 127).astype(np.int8), scales
