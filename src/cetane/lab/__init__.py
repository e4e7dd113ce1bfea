"""Experiments as data: run, gated, judged, and logged."""
