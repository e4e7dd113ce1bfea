"""The key figures at the top of a bundle's page, each with its limit and its basis."""

from collections.abc import Iterator

from cetane.bundle import Bundle
from cetane.gates.golden_result import GoldenResult
from cetane.gates.limits import limits
from cetane.gates.quality import TextQuality
from cetane.gates.residency.audit import Audit, weights_off_ane
from cetane.gates.verdict import Check
from cetane.report.content.figures import DiskUse
from cetane.report.content.page import Absent, KeyFigure
from cetane.report.content.speed import CallTimes, OnDevice
from cetane.report.gate_results import GateResults
from cetane.schema.recipe import Quality


def key_figures(
    bundle: Bundle,
    gates: GateResults,
    audit: Audit,
    disk: DiskUse,
    times: CallTimes | Absent,
    device: OnDevice | Absent,
) -> Iterator[KeyFigure]:
    """The answers to a reader's first questions: is it right, on the ANE, fast and small?"""
    if gates.golden is not None:
        yield from agreement(gates.golden, bundle.plan.recipe.quality)
    if gates.perplexity is not None:
        yield perplexity(*gates.perplexity)
    yield off_the_ane(audit)
    if isinstance(device, OnDevice):
        yield from measured_figures(device)
    if isinstance(times, CallTimes):
        yield predicted_speed(times)
    yield KeyFigure(
        name="size",
        value=disk.bytes / 1e6,
        unit="MB",
        basis="measured",
        better="lower",
        note=f"on disk, {disk.mean_bits:.3g} bits per weight",
    )


def agreement(golden: GoldenResult, quality: Quality) -> Iterator[KeyFigure]:
    """The agreement of the bundle's predictions with the original's, as the golden gate judged it;
    of several adapters, the worst.

    A head that only chooses has no KL, and a share that the gate could not prove is left out."""

    def judged(name: str) -> list[Check]:
        """The checks of this name, each of another adapter."""
        own = f"compression, {quality}: {name}"
        return [check for check in golden.checks if check.name.endswith(own)]

    share = min(judged("top-1 of decided tokens"), key=lambda check: check.value, default=None)
    if share is not None:
        low, high = share.interval or (share.value, share.value)
        yield KeyFigure(
            name="same first choice",
            value=100 * share.value,
            unit="%",
            basis="measured",
            better="higher",
            limit=100 * share.limit,
            low=100 * low,
            high=100 * high,
            note="where the original is sure, on text",
        )
    distance = max(judged("KL"), key=lambda check: check.value, default=None)
    if distance is not None:
        yield KeyFigure(
            name="KL divergence",
            value=distance.value,
            unit="nats",
            basis="measured",
            better="lower",
            limit=distance.limit,
            note="from the original, on text",
        )


def perplexity(quality: TextQuality, text: str) -> KeyFigure:
    """The perplexity on a text, compared with the original's."""
    return KeyFigure(
        name="perplexity",
        value=quality.ratio,
        unit="× the original's",
        basis="measured",
        better="lower",
        limit=quality.limit,
        note=f"{quality.tokens:,} tokens of {text}",
    )


def off_the_ane(audit: Audit) -> KeyFigure:
    """The share of the weights that ops elsewhere read."""
    return KeyFigure(
        name="weights off the Neural Engine",
        value=100 * weights_off_ane(audit.functions),
        unit="%",
        basis="measured" if audit.basis == "measured" else "predicted",
        better="lower",
        limit=100 * limits().residency.weights_off_ane,
        note=f"by rules, {audit.target}" if audit.basis == "predicted" else str(audit.target),
    )


def predicted_speed(times: CallTimes) -> KeyFigure:
    """The speed of decoding at the bundle's context, by the cost model."""
    decode = times.modes[0]
    return KeyFigure(
        name="speed",
        value=decode.tok_s,
        unit="tokens/s",
        basis="predicted",
        better="higher",
        low=None if decode.high is None else 1000 * decode.tokens / decode.high,
        high=None if decode.low is None else 1000 * decode.tokens / decode.low,
        note=f"decoding on {times.chip}",
    )


def measured_figures(device: OnDevice) -> Iterator[KeyFigure]:
    """Speed and energy as a device measured them."""
    for row in device.rows:
        if row.name in ("decoding", "energy of a token"):
            speed = row.name == "decoding"
            yield KeyFigure(
                name="speed" if speed else "energy",
                value=row.value,
                unit=row.unit if speed else "J a token",
                basis="measured",
                better="higher" if speed else "lower",
                note=f"{row.name}, {device.machine}",
            )
