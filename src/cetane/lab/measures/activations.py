"""Activations of 8 bits, calibrated as an arm says."""

from cetane.errors import CetaneError
from cetane.lab.bench import Findings, Side, each


@each("activations")
def activations(side: Side) -> Findings:
    """Cosine and perplexity with quantised activations; nothing of an arm without."""
    if not side.arm.activations:
        return Findings()
    raise CetaneError("activations of 8 bits cannot be measured by this cetane yet")
