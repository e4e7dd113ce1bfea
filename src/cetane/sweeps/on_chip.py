"""Predictions for a compression: the speed of a step, and the residency of its weights."""

from cetane.gates.residency.audit import audit, weights_off_ane
from cetane.gates.residency.sketch import sketch
from cetane.gates.residency.target import Target
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.sweeps.points import Predicted


def predict(planner: Planner, predictor: Predictor, target: Target) -> Predicted:
    """The speed of decoding on the predictor's chip, and the residency of weights on a target."""
    step = predictor.predict(planner, "decode")
    audited = audit(sketch(planner), target)
    findings = [f for function in audited.functions for f in function.findings]
    return Predicted(
        chip=target.chip,
        os=target.os,
        decode_ms=step.ms,
        tok_s=step.tok_s,
        binds=step.binds,
        weights_off_ane=weights_off_ane(audited.functions),
        rules=tuple(dict.fromkeys(f.rule for f in findings)),
    )
