"""Activations of 8 bits: coremltools' own passes calibrate and quantize them, on any machine.

    outcome = measure_activations(bundle, checkpoint, Options(), texts, target, progress)

A bundle keeps its weights: with int8 weights it becomes W8A8, with 4-bit palettes W4A8. See
docs/explanation/activations.md.
"""

from cetane.activations.measure import ActivationOutcome, judge_activations, measure_activations
from cetane.activations.quantize import NAIVE, Options, quantize_activations

__all__ = [
    "NAIVE",
    "ActivationOutcome",
    "Options",
    "judge_activations",
    "measure_activations",
    "quantize_activations",
]
