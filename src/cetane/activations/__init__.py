"""Activations of 8 bits: calibrated and quantized by coremltools' own passes, and judged, anywhere.

    outcome = measure_activations(bundle, checkpoint, Options(), texts, target, progress)

A bundle keeps its weights: one of int8 weights becomes W8A8, one of 4-bit palettes W4A8. See
docs/explanation/activations.md.
"""

from cetane.activations.measure import Outcome, judge_activations, measure_activations
from cetane.activations.quantize import NAIVE, Options, quantize_activations
from cetane.activations.samples import held_out, windows

__all__ = [
    "NAIVE",
    "Options",
    "Outcome",
    "held_out",
    "judge_activations",
    "measure_activations",
    "quantize_activations",
    "windows",
]
