"""Kept answers of a model, so that a stopped evaluation goes on where it was."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cetane.files import is_kept, json_sha256, keep_text, read_json

Answers = dict[str, Any]
BATCH = 64
"""The answers that are written together, as one file."""


class KeptAnswers:
    """Answers by the hash of their request, in the files of a folder; without one, in memory only.

    A file that was changed or damaged is passed over, so its requests are asked again."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.known: Answers = {}
        self.new: Answers = {}
        for path in sorted(folder.glob("*.json")) if folder else ():
            if is_kept(path):
                self.known |= read_json(path)

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
        """Write the new answers to a file, whose name tells their requests."""
        if self.new and self.folder is not None:
            path = self.folder / f"{json_sha256(sorted(self.new))[:32]}.json"
            keep_text(path, json.dumps(self.new))
        self.new = {}
