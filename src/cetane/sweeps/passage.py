"""The passage of a text that a sweep measures and judges on."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.files import LARGEST_TEXT, read_text
from cetane.gates.probes import english

CALIBRATION, HARM, JUDGED = 512, 128, 1024
"""Tokens of the text. The first `CALIBRATION` measure sensitivities; `HARM` of these also measure
the harm to layers. The next `JUDGED` judge the points."""


@dataclass(frozen=True)
class Passage:
    """The name and the tokens of a text."""

    name: str
    sha256: str
    calibration: tuple[int, ...]
    judged: tuple[int, ...]

    @property
    def harm(self) -> tuple[int, ...]:
        """The tokens that measure the harm to layers."""
        return self.calibration[:HARM]

    @classmethod
    def cut(cls, name: str, content: str, checkpoint: Checkpoint) -> "Passage":
        """Cut a text. Raises CetaneError if it is too short for separate tokens to judge on."""
        tokens = checkpoint.tokenizer.encode_first(content, CALIBRATION + JUDGED)
        calibration = min(CALIBRATION, len(tokens) // 3)
        if calibration < HARM:
            raise CetaneError(
                f"{name}: {len(tokens)} tokens are too few for a sweep",
                f"give a text of {3 * HARM} at least, better {CALIBRATION + JUDGED}",
            )
        judged = tokens[calibration : calibration + JUDGED]
        digest = hashlib.sha256(content.encode()).hexdigest()
        return cls(name, digest, tuple(tokens[:calibration]), tuple(judged))


def text_or_english(path: Path | None) -> tuple[str, str]:
    """The name and content of a text, by default of the English one that ships. Raises CetaneError
    if it cannot be read."""
    if path is not None:
        return path.name, read_text(path, LARGEST_TEXT)
    return "english.txt", english()
