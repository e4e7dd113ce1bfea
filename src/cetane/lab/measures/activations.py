"""Measures of 8-bit activations, with an arm's calibration."""

from cetane.lab.sides import Findings, Side, figure, measure_of_side


@measure_of_side("activations")
def activations(side: Side) -> Findings:
    """Cosine and perplexity with quantised activations; empty for an arm without them."""
    if not side.arm.activations:
        return Findings()
    from cetane.activations import NAIVE, Options, measure_activations
    from cetane.gates.probes import windows

    real = Options(tensors="all")
    options = {"naive": NAIVE, "real": real, "real-smooth": Options(tensors="all", smooth=True)}
    bundle, workload = side.bundle, side.workload
    texts = windows(workload.tokens(bundle), side.recipe.cache.context)
    target = workload.setting.folder / "activations" / f"{bundle.path.name}-{side.arm.activations}"
    target.parent.mkdir(parents=True, exist_ok=True)
    outcome = measure_activations(
        bundle, side.checkpoint, options[side.arm.activations], texts, target, side.progress, True
    )
    note = (
        f"calibration {side.arm.activations}, {outcome.made.samples} calls; perplexity "
        f"{outcome.before.perplexity:.4g} without, the model's {outcome.reference_perplexity:.4g}"
    )
    values = {
        "activation_cosine": outcome.after.cosine,
        "activation_perplexity": outcome.after.perplexity,
    }
    return Findings({n: figure(n, v, n=outcome.tokens, note=note) for n, v in values.items()})
