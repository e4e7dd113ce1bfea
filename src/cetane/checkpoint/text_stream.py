"""Text of tokens that arrive one by one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cetane.checkpoint.tokenizer import Tokenizer

HELD = 16
"""Tokens that wait for a whole character, which has at most four bytes. More are no text; to decode
all of them again and again would take quadratic time."""


@dataclass
class TextStream:
    """Decodes a growing generation, without special tokens.

    The library's own DecodeStream raises on invalid UTF-8, which a model may write.
    """

    tokenizer: Tokenizer
    _ids: list[int] = field(default_factory=list)
    """The last tokens: enough to decode the next piece."""
    _emitted: int = 0
    """How many of them have given out their text."""

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: "" while a character is still in parts."""
        self._ids.append(token_id)
        text = self._waiting()
        parts = not text or text.endswith("\N{REPLACEMENT CHARACTER}")
        if parts and len(self._ids) - self._emitted < HELD:
            return ""
        # What was just emitted stays as context: a token's text can depend on the one before it.
        self._ids = self._ids[self._emitted :]
        self._emitted = len(self._ids)
        return text

    def finish(self) -> str:
        """The text that `push` still holds back, decoded without waiting: for the end of a text."""
        text = self._waiting()
        self._emitted = len(self._ids)
        return text

    def _waiting(self) -> str:
        before = self.tokenizer.decode(self._ids[: self._emitted])
        return self.tokenizer.decode(self._ids)[len(before) :]
