"""Measured speed of a bundle, and beside it what the cost model predicts."""

from collections.abc import Iterator, Sequence
from statistics import median

from cetane.kit.measurements import Energy, Label, Measurements
from cetane.perf.cost import Term
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.schema.recipe import Mode
from cetane.validation import Data


class Figures(Data):
    """The figures of a bundle on a machine: medians of its turns. None means not measured."""

    decode_ms: float | None = None
    decode_p95_ms: float | None = None
    decode_tok_s: float | None = None
    prefill_tok_s: float | None = None
    first_token_ms: float | None = None
    verify_ms: float | None = None
    verify_tokens: int | None = None
    load_ms: float | None = None
    """The first load of every function after it was compiled, summed. Each has its own process."""
    load_again_ms: float | None = None
    """The second load of every function, summed."""
    peak_bytes: int | None = None
    joules_per_token: float | None = None
    """Of processor, GPU and Neural Engine together."""
    turns: int = 0


class SpeedCompared(Data):
    """A call of a mode: measured, and as the cost model predicts it."""

    mode: Mode
    tokens: int
    measured_ms: float
    predicted_ms: float
    low: float | None
    high: float | None
    binds: Term

    @property
    def ratio(self) -> float:
        """Measured, divided by predicted."""
        return self.measured_ms / self.predicted_ms

    @property
    def inside(self) -> bool | None:
        """Whether it lies in the predicted interval; None without one."""
        if self.low is None or self.high is None:
            return None
        return self.low <= self.measured_ms <= self.high


def figures(measurements: Measurements, label: Label) -> Figures:
    """The figures of one bundle of a record."""
    turns = [turn for turn in measurements.turns if turn.bundle == label]
    functions = measurements.bundles[label].functions.values()
    first = total([function.load_ms for function in functions])
    again = total([function.load_again_ms for function in functions])
    verified = [turn.verify.median_ms for turn in turns if turn.verify is not None]
    spent = [joules(energy) for energy in measurements.energy if energy.bundle == label]
    per_token = median(spent) if spent else None
    if not turns:
        return Figures(load_ms=first, load_again_ms=again, joules_per_token=per_token)
    return Figures(
        decode_ms=median(turn.decode.median_ms for turn in turns),
        decode_p95_ms=median(turn.decode.p95_ms for turn in turns),
        decode_tok_s=median(turn.decode_tok_s for turn in turns),
        prefill_tok_s=median(turn.prefill_tok_s for turn in turns),
        first_token_ms=median(turn.first_token_ms for turn in turns),
        verify_ms=median(verified) if verified else None,
        verify_tokens=turns[0].verify_tokens,
        load_ms=first,
        load_again_ms=again,
        peak_bytes=max(turn.peak_bytes for turn in turns),
        joules_per_token=per_token,
        turns=len(turns),
    )


def total(times: Sequence[float | None]) -> float | None:
    """The sum of times; None if there are none, or if one was not measured."""
    known = [time for time in times if time is not None]
    return sum(known) if len(known) == len(times) > 0 else None


def joules(energy: Energy) -> float:
    return energy.joules_per_token["processor"]


def ratios(measurements: Measurements) -> dict[str, float]:
    """Medians over all turns of B's figure divided by A's; empty without two bundles."""
    by_turn: dict[int, dict[str, dict[str, float]]] = {}
    for turn in measurements.turns:
        by_turn.setdefault(turn.turn, {})[turn.bundle] = {
            "decode_ms": turn.decode.median_ms,
            "first_token_ms": turn.first_token_ms,
        }
    pairs = [pair for pair in by_turn.values() if {"A", "B"} <= set(pair)]
    if not pairs:
        return {}
    return {name: median(p["B"][name] / p["A"][name] for p in pairs) for name in pairs[0]["A"]}


def compare(own: Figures, planner: Planner, predictor: Predictor) -> Iterator[SpeedCompared]:
    """Compares measured decode and verifying steps with the cost model's predictions."""
    steps: dict[Mode, float | None] = {"decode": own.decode_ms, "verify": own.verify_ms}
    for mode, ms in steps.items():
        if ms is not None and mode in planner.recipe.tokens.by_mode():
            said = predictor.predict(planner, mode)
            yield SpeedCompared(
                mode=said.mode, tokens=said.tokens, measured_ms=ms, predicted_ms=said.ms,
                low=said.low, high=said.high, binds=said.binds,
            )  # fmt: skip
