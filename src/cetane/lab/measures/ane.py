"""Predictions of figures that need an ANE: residency of ops, and steps of the real model."""

from cetane.gates.residency.audit import audit, weights_off_ane
from cetane.gates.residency.target import Target
from cetane.lab.sides import Findings, Side, figure, measure_of_side
from cetane.mil import load
from cetane.perf.breakeven import DraftingTimes
from cetane.perf.predict import Predictor

OF_SIZE = ("tiny-program",)
"""Rules that judge the small model, not the model that it represents."""


@measure_of_side("residency")
def residency(side: Side) -> Findings:
    """The residency of the built packages, by the rules of the workload's chip."""
    without = OF_SIZE if side.workload.spec.stands_for else ()
    packages = {shard.name: side.bundle.shard(shard.name) for shard in side.bundle.plan.shards}
    audited = audit(
        {name: load(path) for name, path in packages.items()}, Target(side.chip.id), without
    )
    ops = sum(function.count() for function in audited.functions)
    on = sum(function.count("ANE") for function in audited.functions)
    decoding = [f for f in audited.functions if not f.variant and f.tokens == 1]
    off = {
        f"{op.kind} ({op.rule})"
        for f in decoding
        for op in f.ops
        if op.final not in ("ANE", "unknown")
    }
    values: dict[str, float] = {
        "ane_ops": on / max(ops, 1),
        "off_ane": sum(f.count() - f.count("ANE") for f in decoding),
        "ane_weights": 1 - weights_off_ane(audited.functions),
        "residency": float(audited.passed),
        "largest_program": max(function.count() for function in audited.functions),
    }
    texts = {"residency": "; ".join(audited.reasons)} if audited.reasons else {}
    if off:
        texts["off the ANE"] = ", ".join(sorted(off))
    note = f"rules, {audited.target}" + (f", without {', '.join(without)}" if without else "")
    return Findings(
        {name: figure(name, value, "predicted", note=note) for name, value in values.items()}, texts
    )


@measure_of_side("speed")
def speed(side: Side) -> Findings:
    """The predicted speed of the model that the workload represents, with the recipe that ships."""
    planner, predictor = side.real, Predictor(side.chip)
    plan, recipe = planner.plan(), planner.recipe
    work = side.workload.spec
    note = f"{work.stands_for or work.model}, {side.chip.name}, {recipe.cache.context} slots"
    decode = predictor.predict(planner, "decode")
    figures = {
        "predicted_ms": figure(
            "predicted_ms", decode.ms, "predicted", decode.low, decode.high,
            note=f"{note}; {decode.binds} binds",
        ),
        "predicted_bytes": figure("predicted_bytes", plan.weight_bytes, "predicted", note=note),
        "predicted_cache_bytes": figure(
            "predicted_cache_bytes", cache_bytes(side), "predicted", note=note
        ),
    }  # fmt: skip
    if recipe.tokens.shapes == "range" or recipe.tokens.verify is None:
        why = "no verifying function, or one of flexible shapes: off the ANE but at its default"
        for name in ("predicted_verify_ms", "predicted_break_even"):
            figures[name] = figure(name, None, "predicted", note=why)
        return Findings(figures)
    verify = predictor.predict(planner, "verify")
    spec = DraftingTimes(decode.ms, verify.ms, verify.tokens)
    share = spec.break_even_share()
    figures["predicted_verify_ms"] = figure(
        "predicted_verify_ms", verify.ms, "predicted", verify.low, verify.high,
        note=f"T = {verify.tokens}, {note}",
    )  # fmt: skip
    figures["predicted_break_even"] = figure(
        "predicted_break_even", share, "predicted",
        note="drafting not counted" if share is not None else "no acceptance pays",
    )  # fmt: skip
    return Findings(figures)


def cache_bytes(side: Side) -> int:
    """Bytes of all layers' keys and values at the recipe's context."""
    plan = side.real.plan()
    return plan.kv_bytes[plan.recipe.cache.context]
