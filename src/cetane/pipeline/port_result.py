"""How a port went, and what was asked of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from cetane.bundle import Bundle
from cetane.gates.explain import Explanation
from cetane.gates.golden_result import GoldenResult
from cetane.gates.ladder import LadderResult
from cetane.gates.residency.audit import Audit
from cetane.gates.residency.store import summary
from cetane.gates.residency.target import Target
from cetane.pipeline.plan import Forecast, forecast_json
from cetane.schema.plan import Plan


class Gate(Protocol):
    """What every gate's outcome tells."""

    @property
    def passed(self) -> bool: ...


@dataclass(frozen=True)
class PortTarget:
    """Where a port shall run, and whether its ops must be predicted to be on the ANE there."""

    target: Target = field(default_factory=Target)
    named: bool = False
    """Whether the user named the chip."""
    required: bool = False


@dataclass(frozen=True)
class PortResult:
    """How a port went. A gate that fails is part of the result, not an exception."""

    plan: Plan
    bundle: Bundle | None
    """None when the first shards failed their gate: the others were not built."""
    ladder: LadderResult | None
    """The first shard of every kind against the model; None for a bundle that was there before."""
    residency: Audit | None
    """Where the ops of those shards are predicted to run. None for a bundle that was there before,
    unless residency is required."""
    golden: GoldenResult | None
    """The finished bundle against the model; None when there is no bundle."""
    explanation: Explanation | None
    """Why a gate is red, and what mends it; None where none is."""
    forecast: Forecast
    """How fast the chip is predicted to run the plan."""
    seconds: Mapping[str, float]
    """Wall-clock seconds by stage: `choose`, `build` (without the gates), `ladder`, `residency`,
    `golden`."""
    residency_required: bool = False
    """Whether the port is for a named chip, and must be predicted to be on its ANE."""
    changes: tuple[str, ...] = ()
    """What was changed after a red gate, and why: one line each."""
    refused: str | None = None
    """Why the next change was not tried: it exceeds the budget, or does not fit the model."""
    warnings: tuple[str, ...] = ()
    """Signs of a misread checkpoint."""

    @property
    def kept(self) -> bool:
        """Whether the bundle was there before, and was only judged again."""
        return self.bundle is not None and self.ladder is None

    @property
    def gates(self) -> dict[str, Gate]:
        """The outcomes of the gates that ran, by name."""
        named = {"ladder": self.ladder, "residency": self.residency, "golden": self.golden}
        return {name: outcome for name, outcome in named.items() if outcome is not None}

    @property
    def off_the_ane(self) -> bool:
        """Whether residency is required, and not predicted."""
        return self.residency_required and self.residency is not None and not self.residency.passed

    @property
    def passed(self) -> bool:
        """Whether the bundle is right, and on the ANE where that is required."""
        return self.golden is not None and self.golden.passed and not self.off_the_ane

    def as_json(self) -> dict[str, Any]:
        """The result as a JSON object."""
        return {
            "bundle": None if self.bundle is None else str(self.bundle.path),
            "digest": None if self.bundle is None else self.bundle.digest,
            "passed": self.passed,
            "seconds": dict(self.seconds),
            "explanation": explanation_json(self.explanation),
            "reasons": dict(self.plan.recipe.reasons),
            "changes": list(self.changes),
            "refused": self.refused,
            "warnings": list(self.warnings),
            "residency_required": self.residency_required,
            "predicted": forecast_json(self.forecast),
            "gates": {name: gate_json(outcome) for name, outcome in self.gates.items()},
        }


def explanation_json(explanation: Explanation | None) -> dict[str, Any] | None:
    """Why a gate is red, as a JSON object."""
    return None if explanation is None else explanation.model_dump(mode="json")


def gate_json(outcome: Gate) -> dict[str, Any]:
    """A gate's outcome as a bundle keeps it."""
    if isinstance(outcome, Audit):
        return summary(outcome)
    assert isinstance(outcome, LadderResult | GoldenResult)
    return outcome.model_dump(mode="json")
