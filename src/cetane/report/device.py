"""What a device measured, beside what was predicted."""

import shlex
from collections.abc import Iterator

from cetane.kit.device import DEVICE, ENERGY, DeviceResult, EnergyResult
from cetane.report.content.page import Absent
from cetane.report.content.speed import DeviceRow, OnDevice, RefutedRule
from cetane.report.gate_results import GateResults
from cetane.report.verdicts import outcome_word
from cetane.schema.recipe import Mode


def on_device(gates: GateResults) -> OnDevice | Absent:
    """The imported record of a device."""
    result = gates.read(DEVICE, DeviceResult)
    if result is None:
        return Absent(
            why="No device has measured it.",
            command=f"cetane kit {shlex.quote(str(gates.bundle.path))} -o kit.zip",
        )
    return OnDevice(
        machine=result.machine,
        date=result.date,
        compute_units=result.compute_units,
        outcome=outcome_word(result.passed),
        rows=tuple(rows(result, energy(gates, result))),
        rules=tuple(
            RefutedRule(rule=r.rule, predicted=r.predicted, wrong=r.wrong, ops=r.ops,
                        narrow=r.narrow)
            for r in result.rules
        ),
        measured_ops=result.measured_ops,
        ties=result.ties,
        positions=result.positions,
        faults=result.faults,
        caveats=result.caveats,
    )  # fmt: skip


def energy(gates: GateResults, result: DeviceResult) -> float | None:
    """Joules per token: from the kit, else from a meter's file that was imported alone."""
    if result.figures.joules_per_token is not None:
        return result.figures.joules_per_token
    alone = gates.read(ENERGY, EnergyResult)
    if alone is None or alone.joules_per_token is None:
        return None
    return alone.joules_per_token.get("processor")


def rows(result: DeviceResult, joules: float | None) -> Iterator[DeviceRow]:
    """Every figure that was measured."""
    predicted = {one.mode: one for one in result.compared}
    own = result.figures
    calls: tuple[tuple[str, Mode, float | None], ...] = (
        ("a token, decoding", "decode", own.decode_ms),
        (f"a verifying call, T = {own.verify_tokens}", "verify", own.verify_ms),
    )
    for name, mode, value in calls:
        if value is not None:
            beside = predicted.get(mode)
            yield DeviceRow(
                name=name, value=value, unit="ms",
                predicted=None if beside is None else beside.predicted_ms,
                low=None if beside is None else beside.low,
                high=None if beside is None else beside.high,
            )  # fmt: skip
    for name, value, unit in (
        ("decoding", own.decode_tok_s, "tokens/s"),
        ("prefill", own.prefill_tok_s, "tokens/s"),
        ("first token", own.first_token_ms, "ms"),
        ("load, after compiling", own.load_ms, "ms"),
        ("load, again", own.load_again_ms, "ms"),
        ("memory at most", own.peak_bytes and own.peak_bytes / 1e6, "MB"),
        ("energy of a token", joules, "J"),
    ):
        if value is not None:
            yield DeviceRow(name=name, value=value, unit=unit)
