"""How a draft head is trained, and what comes of it: what it knows, and its gates."""

from dataclasses import dataclass
from typing import Any

from cetane.bundle.draft_heads import DraftHead
from cetane.gates.draft_head import DraftHeadResult
from cetane.gates.residency.audit import Audit
from cetane.speculate.draft_heads.acceptance import Acceptance

FEWER = 0.1
"""By how much the share of right first tokens may fall in another bundle. SmolLM2's fell by 0.02 in
6 bits and by nothing in 4.6; with a wrong factor on its hidden states it fell by 0.16."""


@dataclass(frozen=True)
class DraftHeadSettings:
    """How a draft head is trained."""

    tokens: int = 200_000
    """The most tokens of each text."""
    window: int = 256
    """Tokens of one forward pass; at most the bundle's context."""
    vocabulary: int = 8192
    """Tokens that the draft head may propose."""
    steps: int = 3
    """Tokens of a draft."""
    epochs: int = 10
    minutes: float = 30.0
    """The most minutes, including the computation of hidden states."""
    batch: int = 4
    """Windows of a training step, on each device."""


DEFAULTS = DraftHeadSettings()


@dataclass(frozen=True)
class TrainedDraftHead:
    """A trained draft head and its gates."""

    head: DraftHead
    """The draft head in the bundle: the earlier one, if the new one failed its golden gate."""
    untrained: Acceptance | None
    """None for a draft head that was trained elsewhere."""
    trained: Acceptance
    elsewhere: Acceptance | None
    """What it knew where it was trained, if that was elsewhere."""
    golden: DraftHeadResult
    """The finished shard, compared with the trained module."""
    residency: Audit
    """Of `head`. A prediction: it warns, and does not affect `passed`."""
    windows: int
    """Windows of text for training."""
    held_out: int
    """Windows of text for judging."""
    minutes: float
    cpu_minutes: float

    @property
    def passed(self) -> bool:
        return self.golden.passed

    @property
    def placed(self) -> bool:
        """Whether the bundle has the new draft head, and not an earlier one of its kind."""
        return self.golden.heads[self.head.name] == self.head.digest

    @property
    def judged(self) -> bool:
        """Whether the held-out text tells what it knows."""
        return bool(self.trained.top1)

    @property
    def worse(self) -> bool:
        """Whether it knows far fewer first tokens than where it was trained: perhaps it is the
        draft head of another model of the same shape."""
        if self.elsewhere is None or not self.elsewhere.top1 or not self.judged:
            return False
        return self.trained.top1[0] < self.elsewhere.top1[0] - FEWER

    def as_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return {
            "head": str(self.head.path),
            "digest": self.head.digest,
            "passed": self.passed,
            "placed": self.placed,
            "windows": self.windows,
            "held_out": self.held_out,
            "untrained": self.untrained and self.untrained.model_dump(mode="json"),
            "elsewhere": self.elsewhere and self.elsewhere.model_dump(mode="json"),
            "minutes": self.minutes,
            "cpu_minutes": self.cpu_minutes,
            "worse": self.worse,
            "trained": self.trained.model_dump(mode="json"),
            "residency": self.residency.passed,
            "golden": self.golden.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class AddedDraftHeads:
    """Draft heads that were added to a bundle, and their gates."""

    heads: tuple[TrainedDraftHead, ...]

    @property
    def passed(self) -> bool:
        return all(one.passed for one in self.heads)

    def as_json(self) -> dict[str, Any]:
        """The outcome as a JSON object."""
        return {"passed": self.passed, "heads": [one.as_json() for one in self.heads]}
