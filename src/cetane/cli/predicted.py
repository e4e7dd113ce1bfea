"""Predicted speed for people and as JSON: every number here is predicted, none is measured."""

from collections.abc import Sequence
from typing import Any

from cetane.cli.output import console, table
from cetane.hardware.chips import Chip
from cetane.perf.breakeven import Speculation
from cetane.perf.combinations import CONTEXTS, Combination
from cetane.perf.cost import TERM_OF
from cetane.perf.predict import Prediction, Predictor
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

SHOWN = 15
"""Combinations of a sweep that are printed."""
TERMS = tuple(dict.fromkeys(TERM_OF.values()))


def predictions(planner: Planner, predictor: Predictor) -> list[Prediction]:
    """Every mode at the recipe's context and at some others; of flexible shapes only the default,
    since the ANE runs no other (coremltools #2370)."""
    contexts = {planner.recipe.cache.context, *CONTEXTS}
    flexible = planner.recipe.tokens.shapes == "range"
    return [
        predictor.predict(planner, mode, context)
        for mode, tokens in planner.recipe.tokens.by_mode().items()
        for context in sorted(contexts)
        if tokens <= context <= planner.model.max_context and not (flexible and tokens > 1)
    ]


def speculation(found: Sequence[Prediction], context: int) -> Speculation | None:
    """A verifier against plain steps at a context, if there is one."""
    mine = {p.mode: p for p in found if p.context == context}
    if "verify" not in mine:
        return None
    return Speculation(mine["decode"].ms, mine["verify"].ms, mine["verify"].tokens)


def show_predicted(planner: Planner, predictor: Predictor) -> None:
    """Milliseconds of every mode, what binds them, and whether a verifier pays."""
    found, chip = predictions(planner, predictor), predictor.chip
    rows = [
        [p.mode, p.tokens, p.context, f"{p.ms:.1f}", interval(p), f"{p.tok_s:.1f}", p.binds]
        for p in found
    ]
    columns = ["mode", "T", "context", "ms", "interval", "tok/s", "binds"]
    table(f"predicted on {chip.name}", columns, rows)
    context = planner.recipe.cache.context
    for p in found:
        if p.context == context:
            parts = " + ".join(f"{term} {p.terms[term]:.1f}" for term in TERMS)
            console.print(f"predicted {p.mode} at {context}: {parts} ms")
    console.print(footing(predictor))
    if len({p.mode for p in found}) > 1:
        console.print("tok/s of a verifying call: if every draft is accepted")
    spec = speculation(found, context)
    if spec is not None:
        console.print(
            f"predicted: a verifying call of {spec.width} takes {spec.slowdown:.2f} decode steps, "
            + verdict(spec)
        )


def verdict(spec: Speculation) -> str:
    """From which acceptance on a verifier pays."""
    share = spec.break_even_share()
    if share is None:
        return "so that no acceptance pays"
    return f"so that it pays from {share:.0%} of drafts accepted, drafting not counted"


def interval(found: Prediction) -> str:
    """The interval, or that there is none."""
    return "unknown" if found.low is None else f"{found.low:.1f} to {found.high:.1f}"


def footing(predictor: Predictor) -> str:
    """What the predictions rest on, in one line."""
    errors = predictor.fit.errors
    if not predictor.chip.devices:
        return (
            f"predicted, without an interval: nothing of {predictor.chip.name} was ever fitted; "
            "--explain tells what is borrowed"
        )
    return (
        f"predicted; {errors.share:.0%} of {errors.rows} steps of left-out models were within "
        f"the interval, half of them within {errors.median:.0%}; --explain gives the sources"
    )


def explain_rates(predictor: Predictor) -> None:
    """The rates behind the predictions, with their sources."""
    rows = [
        [name, TERM_OF[name], f"{r.value:.4g} {r.unit}", f"{r.low:.4g} to {r.high:.4g}", r.kind,
         r.source]
        for name, r in predictor.rates.items()
    ]  # fmt: skip
    table(
        f"rates on {predictor.chip.name} (docs/performance.md has the formulas)",
        ["rate", "term", "value", "one group left out", "kind", "source"],
        rows,
    )
    limits = [
        [name, figure.value, (f"borrowed from {figure.of}: " if figure.of else "") + figure.source,
         figure.date]
        for name in ("program_bytes", "programs", "states", "axis", "notch")
        for figure in [predictor.chip.figure(name)]
    ]  # fmt: skip
    table(f"limits of {predictor.chip.name}", ["limit", "value", "source", "date"], limits)


def as_json(found: Prediction) -> dict[str, Any]:
    return {
        "mode": found.mode,
        "tokens": found.tokens,
        "context": found.context,
        "ms": found.ms,
        "low": found.low,
        "high": found.high,
        "tok_s": found.tok_s,
        "binds": found.binds,
        "terms_ms": dict(found.terms),
    }


def predicted_json(planner: Planner, predictor: Predictor) -> dict[str, Any]:
    """What `show_predicted` and `explain_rates` print, under the key `predicted`."""
    found = predictions(planner, predictor)
    spec = speculation(found, planner.recipe.cache.context)
    return {
        "predicted": {
            "chip": predictor.chip.id,
            "modes": [as_json(p) for p in found],
            "speculation": None
            if spec is None
            else {
                "width": spec.width,
                "slowdown": spec.slowdown,
                "feasible": spec.feasible,
                "break_even_share": spec.break_even_share(),
                "break_even_chance": spec.break_even_chance(),
            },
            "errors": predictor.fit.errors.model_dump(),
            "rates": {name: r.model_dump() for name, r in predictor.rates.items()},
        }
    }


def ranked(combinations: Sequence[Combination], refused: bool = False) -> list[Combination]:
    """The fastest first; those that the chip holds, or those that it does not."""
    mine = [c for c in combinations if (c.refused is not None) == refused]
    return sorted(mine, key=lambda c: (c.decode.ms, c.slowdown / c.verify))


def recommended(combinations: Sequence[Combination], recipe: Recipe) -> Combination | None:
    """The fastest that the chip holds, at the recipe's own context."""
    mine = [c for c in ranked(combinations) if c.context == recipe.cache.context]
    return mine[0] if mine else None


def describe(one: Combination) -> str:
    return f"{one.layout}, {one.contract}, {one.format}, verify {one.verify}, {one.context} slots"


def show_sweep(combinations: Sequence[Combination], recipe: Recipe, chip: Chip) -> None:
    """The fastest combinations, the one to take, and what is faster but not held."""
    held = ranked(combinations)
    shown = list({(c.layout, c.contract, c.format, c.context): c for c in reversed(held)}.values())
    rows = [
        [c.layout, c.contract, c.format.partition("-")[0], c.context, f"{c.decode.ms:.1f}",
         f"{c.decode.tok_s:.1f}", c.decode.binds, f"{c.verify}: {c.slowdown:.2f}"]
        for c in shown[: -SHOWN - 1 : -1]
    ]  # fmt: skip
    columns = ["layout", "cache", "format", "context", "ms", "tok/s", "binds", "T: tK/t1"]
    title = f"predicted on {chip.name}: {len(held)} of {len(combinations)} combinations fit it"
    table(title, columns, rows)
    best = recommended(combinations, recipe)
    if best is None:
        console.print(f"nothing fits at a context of {recipe.cache.context}")
    else:
        console.print(
            f"recommended at a context of {recipe.cache.context}, by predicted speed alone: "
            f"{describe(best)}: {best.decode.tok_s:.1f} tok/s, {best.decode.binds} binds"
        )
    over = [c for c in ranked(combinations, refused=True)
            if c.context == recipe.cache.context]  # fmt: skip
    if over and (best is None or over[0].decode.ms < best.decode.ms):
        console.print(
            f"predicted to be faster, but: {describe(over[0])}: {over[0].decode.tok_s:.1f} tok/s; "
            f"{over[0].refused}"
        )


def sweep_json(combinations: Sequence[Combination], recipe: Recipe, chip: Chip) -> dict[str, Any]:
    """All combinations, ranked, those that the chip does not hold after those that it does."""

    def row(c: Combination) -> dict[str, Any]:
        return {
            "layout": c.layout,
            "contract": c.contract,
            "format": c.format,
            "verify": c.verify,
            "context": c.context,
            "refused": c.refused,
            "decode": as_json(c.decode),
            "verifying": as_json(c.verifying),
            "slowdown": c.slowdown,
        }

    best = recommended(combinations, recipe)
    return {
        "predicted": {
            "chip": chip.id,
            "recommended": None if best is None else row(best),
            "combinations": [row(c) for r in (False, True) for c in ranked(combinations, r)],
        }
    }
