"""Evaluation: lm-evaluation-harness on bundles."""
