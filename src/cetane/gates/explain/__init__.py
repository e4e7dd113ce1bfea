"""Explains why a port was refused, in one sentence: cause, place and the change that mends it."""

from cetane.gates.explain.explanation import Cause, Explanation
from cetane.gates.explain.golden import explain
from cetane.gates.explain.ladder import explain_ladder
from cetane.gates.explain.residency import explain_residency

__all__ = ["Cause", "Explanation", "explain", "explain_ladder", "explain_residency"]
