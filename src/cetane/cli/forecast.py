"""Tables of predicted speeds. Every number here is predicted, none is measured."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING

from cetane.cli.gate_tables import show_why
from cetane.cli.options import ALLOW_OFF_ANE
from cetane.cli.output import megabytes, say_wrapped, show_warnings, table
from cetane.files import documentation
from cetane.hardware.chips import load_chips
from cetane.perf.cost import TERM_OF

if TYPE_CHECKING:
    from cetane.hardware.chips import Chip, Quantity
    from cetane.perf.breakeven import DraftingTimes
    from cetane.perf.combinations import Combination
    from cetane.perf.predict import Prediction, Predictor
    from cetane.pipeline.plan import Forecast, PlannedResidency, Ranking

SHOWN = 15
"""The number of combinations that are printed."""
TERMS = tuple(dict.fromkeys(TERM_OF.values()))
LIMITS: dict[Quantity, Callable[[float], str]] = {
    "program_bytes": megabytes,
    "programs": "{:.0f} programs".format,
    "states": "{:.0f} states".format,
    "axis": "{:.0f} elements".format,
}
"""What a chip holds at most, in words. The notch is a rate, and no prediction uses it."""


def known_chips() -> str:
    return f"--chip {', '.join(load_chips())}"


def headline(forecast: Forecast) -> str:
    """The speed of plain decoding in one line, with its interval or its borrowed source."""
    decode, chip = forecast.decode, forecast.chip
    if decode is None:
        return nothing_known(chip)
    speed = f"{decode.tok_s:.0f} tokens/s on {chip.name} at {forecast.context} tokens"
    if decode.low is None or decode.high is None:
        return f"{speed}, from rates of other chips: {chip.name} was never measured"
    low, high = 1000 * decode.tokens / decode.high, 1000 * decode.tokens / decode.low
    return f"{speed} ({low:.0f} to {high:.0f})"


def nothing_known(chip: Chip) -> str:
    """Why a chip gets no number."""
    return f"unknown: {chip.no_speed}"


def show(forecast: Forecast, explain: bool) -> None:
    """Print milliseconds of every mode, the binding term, and whether a verifier pays.

    With `explain`, print the sources.
    """
    predictions, chip = forecast.predictions, forecast.chip
    show_memory(forecast)
    if forecast.predictor is None:
        say_wrapped(f"speed on {chip.name}, {nothing_known(chip)}")
        return
    rows = [
        [p.mode, p.tokens, p.context, f"{p.ms:.1f}", interval(p), f"{p.tok_s:.1f}", p.binds]
        for p in predictions
    ]
    borrowed = "" if chip.devices else ", from rates of other chips, since it was never measured"
    columns = ["mode", "T", "context", "ms", "interval", "tok/s", "binds"]
    table(f"predicted on {chip.name}{borrowed}", columns, rows)
    for p in predictions:
        if p.context == forecast.context:
            parts = " + ".join(f"{term} {p.terms[term]:.1f}" for term in TERMS)
            say_wrapped(f"predicted {p.mode} at {p.context}: {parts} ms")
    say_wrapped(footing(forecast.predictor))
    if len({p.mode for p in predictions}) > 1:
        say_wrapped("tok/s of a verifying call assumes that every draft is accepted")
    if any(p.mode == "prefill" for p in predictions):
        say_wrapped("a prefill call has no head; the last call of a prompt runs it too")
    spec = forecast.speculation
    if spec is not None:
        say_wrapped(
            f"predicted: a verifying call of {spec.width} takes {spec.slowdown:.2f} decode steps, "
            + break_even(spec)
        )
    if len(forecast.capacities) > 1:
        show_capacities(forecast)
    if explain:
        explain_rates(forecast.predictor)


def show_memory(forecast: Forecast) -> None:
    """Compare weights and caches with the memory of a phone, if that is known. No source tells the
    share of it that iOS lets an app use."""
    held, most = forecast.held, forecast.chip.most_memory
    if most is None:
        return
    size = megabytes(held) if held < 1e9 else f"{held / 1e9:.1f} GB"
    used = f"{size} of weights and caches"
    phones = f"iPhone with an {forecast.chip.name}"
    if held > most:
        show_warnings([f"{used} are more than the {most >> 30} GB of every {phones}"])
    else:
        say_wrapped(
            f"{used}; no {phones} has more than {most >> 30} GB, and an app gets a part of it"
        )


def show_residency(residency: PlannedResidency, speeds: bool) -> None:
    """Name the risks of a plan, and warn of one that rules put off the ANE: predicted `speeds`, if
    any, do not hold there."""
    audit = residency.audit
    risks = [rule for rule, severity in audit.severities.items() if severity == "risk"]
    if risks:
        say_wrapped(f"risk, {audit.basis}: {', '.join(risks)}; see cetane audit --explain RULE")
    if not audit.passed:
        named = f"residency, {audit.basis} for {audit.target}"
        others = audit.reasons[1:]  # the explanation tells the first
        show_warnings([f"{named}: FAIL", *(f"{named}: {reason}" for reason in others)])
        show_why(residency.explanation)
        if residency.newer_system is None:
            alone = "; predicted speeds are those of the ANE alone" if speeds else ""
            show_warnings([f"a port stops there without {ALLOW_OFF_ANE}{alone}"])


def show_capacities(forecast: Forecast) -> None:
    """Print the cost of a step at every capacity, and of the copy to the next."""
    rows = [
        [c.tokens, c.functions, f"{c.decode.ms:.1f}", f"{c.decode.tok_s:.1f}", f"{c.crossing:.1f}",
         "" if not c.crossing or c.break_even is None else ceil(c.break_even)]
        for c in forecast.capacities
    ]  # fmt: skip
    columns = ["capacity", "functions", "decode ms", "tok/s", "copy to the next, ms",
               "pays after, tokens"]  # fmt: skip
    table(f"predicted capacities on {forecast.chip.name}", columns, rows)


def break_even(spec: DraftingTimes) -> str:
    """An acceptance at which a verifier pays, in words: in whole percent, rounded up."""
    share = spec.break_even_share()
    if share is None:
        return "so no acceptance pays"
    percent = max(1, ceil(100 * share))
    return f"so it pays if {percent}% of drafted tokens are accepted, without the time of drafting"


def interval(prediction: Prediction) -> str:
    """The interval in words, or a remark that there is none."""
    if prediction.low is None:
        return "unknown"
    return f"{prediction.low:.1f} to {prediction.high:.1f}"


def footing(predictor: Predictor) -> str:
    """The basis of the predictions, in one line."""
    misses = predictor.fit.errors
    if not predictor.chip.devices:
        return (
            f"predicted, without an interval: {predictor.chip.name} was never measured; "
            "--explain lists the borrowed rates"
        )
    return (
        f"predicted; of {misses.rows} steps of left-out models, {misses.share:.0%} were within the "
        f"interval, and half within {misses.median:.0%}; --explain gives the sources"
    )


def explain_rates(predictor: Predictor) -> None:
    """Print the rates behind the predictions, with their sources."""
    rows = [
        [name, TERM_OF[name], f"{r.value:.4g} {r.unit}", f"{r.low:.4g} to {r.high:.4g}", r.kind,
         r.source]
        for name, r in predictor.rates.items()
    ]  # fmt: skip
    table(
        f"rates on {predictor.chip.name} ({documentation('explanation/cost-model.md')} has the "
        "formulas)",
        ["rate", "term", "value", "one group left out", "kind", "source"],
        rows,
    )
    limits = [
        [name, told(figure.value),
         (f"borrowed from {figure.of}: " if figure.of else "") + figure.source, figure.date]
        for name, told in LIMITS.items()
        for figure in [predictor.chip.figure(name)]
    ]  # fmt: skip
    table(f"limits of {predictor.chip.name}", ["limit", "value", "source", "date"], limits)


def describe(one: Combination) -> str:
    return f"{one.layout}, {one.contract}, {one.format}, verify {one.verify}, {one.context} slots"


def show_ranking(ranking: Ranking) -> None:
    """Print the fastest combinations, the fastest at the recipe's context, and a refused one if it
    is faster."""
    held = ranking.held
    shown = list({(c.layout, c.contract, c.format, c.context): c for c in reversed(held)}.values())
    rows = [
        [c.layout, c.contract, c.format.partition("-")[0], c.context, f"{c.decode.ms:.1f}",
         f"{c.decode.tok_s:.1f}", c.decode.binds, f"{c.verify}: {c.slowdown:.2f}"]
        for c in shown[: -SHOWN - 1 : -1]
    ]  # fmt: skip
    columns = ["layout", "cache", "format", "context", "ms", "tok/s", "binds", "T: tK/t1"]
    fitting = f"{len(held)} of {len(ranking.combinations)} combinations fit it"
    table(f"predicted on {ranking.chip.name}: {fitting}", columns, rows)
    best = ranking.fastest
    if best is None:
        say_wrapped(
            f"nothing that is known to pass every gate fits at a context of {ranking.context}"
        )
    else:
        say_wrapped(
            f"the fastest at a context of {ranking.context}: {describe(best)}: "
            f"{best.decode.tok_s:.1f} tok/s, {best.decode.binds} binds"
        )
    say_wrapped(
        "recommended is only what no rule refuses, with the cache contract that rules ask for, in "
        "fp16 or in a format that a port of this model has judged"
    )
    over = [c for c in ranking.refused if c.context == ranking.context]
    if over and (best is None or over[0].decode.ms < best.decode.ms):
        said = f"{describe(over[0])}: {over[0].decode.tok_s:.1f} tok/s; {over[0].refused}"
        say_wrapped(f"predicted to be faster, but refused: {said}")
