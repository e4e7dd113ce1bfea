"""Kept answers of a model, so that a stopped evaluation goes on where it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cetane.files import json_sha256
from cetane.ledger import Ledger

Answers = dict[str, Any]
BATCH = 64
"""The answers that are written together, since the disk syncs each line of a ledger."""


class KeptAnswers:
    """Answers by the hash of their request, in a ledger; without a path, in memory only."""

    def __init__(self, path: Path | None) -> None:
        hint = "remove it to evaluate anew"
        self.ledger = None if path is None else Ledger(path, TypeAdapter(Answers), hint)
        self.known: Answers = {}
        self.new: Answers = {}
        if self.ledger is not None:
            self.ledger.repair()
            for line in self.ledger.read():
                self.known |= line

    def get(self, kind: str, request: Sequence[Any]) -> tuple[str, Any]:
        """The key of a request, and its answer if it is known."""
        key = json_sha256([kind, *request])[:32]
        return key, self.known.get(key)

    def add(self, key: str, answer: Any) -> None:
        """Keep an answer that JSON can hold. Every `BATCH` answers are written."""
        self.known[key] = self.new[key] = answer
        if len(self.new) >= BATCH:
            self.save()

    def save(self) -> None:
        """Write the new answers to the ledger."""
        if self.new and self.ledger is not None:
            self.ledger.append(self.new)
        self.new = {}
