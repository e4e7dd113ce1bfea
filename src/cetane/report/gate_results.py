"""The results that a bundle's gates left, and the command that makes each anew."""

import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from cetane.bundle import Bundle
from cetane.gates.golden_result import GoldenResult
from cetane.gates.ladder import LadderResult
from cetane.gates.quality import TextQuality
from cetane.schema.manifest import GATES
from cetane.validation import validated

Result = TypeVar("Result", bound=BaseModel)
MAKERS = {"ladder": "cetane port", "activations": "cetane quantize-activations"}
"""Commands that judge a bundle by these gates while they make it, and never after."""


class GateResults:
    """The stored results of a bundle's gates."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.results = bundle, bundle.gates()

    @property
    def golden(self) -> GoldenResult | None:
        return self.read("golden", GoldenResult)

    @property
    def ladder(self) -> LadderResult | None:
        return self.read("ladder", LadderResult)

    @property
    def perplexity(self) -> tuple[TextQuality, str] | None:
        """The result, and the name of the text."""
        kept = self.results.get("perplexity")
        if kept is None:
            return None
        quality = self.read("perplexity", TextQuality, "text")
        return None if quality is None else (quality, str(kept.get("text", "a text")))

    def read(self, gate: str, kind: type[Result], *without: str) -> Result | None:
        """A gate's result. Raises CetaneError if the file is not a result of this gate."""
        kept = self.results.get(gate)
        if kept is None:
            return None
        content = {key: value for key, value in kept.items() if key not in without}
        again = "make the bundle" if gate in MAKERS else "run it"
        hint = f"{again} again: {command(gate, self.bundle.path)}"
        return validated(kind, content, str(self.file(gate)), hint)

    def file(self, gate: str) -> Path:
        return self.bundle.file(f"{GATES}/{gate}.json")

    def date(self, gate: str) -> str | None:
        """The time of a gate's result."""
        return changed_at(self.file(gate)) if gate in self.results else None


def command(gate: str, bundle: Path) -> str:
    """The command that runs a gate, also a draft head's `GATE-HEAD`."""
    path = shlex.quote(str(bundle))
    commands = MAKERS | {
        "golden": f"cetane validate {path}",
        "static": f"cetane validate {path}",
        "layers": f"cetane validate {path} --full",
        "perplexity": f"cetane validate {path} --perplexity TEXT",
        "residency": f"cetane audit {path}",
        "evaluation": f"cetane eval {path} --against reference",
        "device": f"cetane import measurements.json {path}",
    }
    return commands.get(gate.partition("-")[0], f"cetane info {path}")


def changed_at(path: Path) -> str:
    """The time of a file's last change, in UTC, to the minute."""
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).strftime("%Y-%m-%d %H:%M UTC")
