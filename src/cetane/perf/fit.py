"""Fits the rates to the evidence, and measures their errors on left-out groups.

`python -m cetane.perf.fit` prints the errors; `--write` renews `data/rates.toml`. Files of further
evidence, such as those that `cetane import` writes, can follow.

The loss is the sum of absolute relative errors, smoothed near zero, so a few rows may be far off. A
group is a model on a device. Its weight is the root of its number of rows, so that no model with
many rows dominates. Rates are not negative. Errors are those of steps in left-out groups.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tomli_w

from cetane.errors import CetaneError
from cetane.hardware.chips import DEFAULT_CHIP, find_chip
from cetane.perf.cost import (
    Errors,
    Fit,
    Rate,
    RateName,
    Rates,
    costs_of,
    on_chip,
    terms,
    total,
    usage,
)
from cetane.perf.evidence import read, shipped
from cetane.perf.measurement import Measurement

FITTED: dict[RateName, str] = {
    "dispatch": "ms",
    "any_unit": "ms",
    "matvec": "G/s",
    "half": "GB/s",
    "memory": "GB/s",
    "border": "GB/s",
    "sort": "ns",
}
"""The fitted rates and their units: `compute` is fitted to prefill, others to decode steps."""
START: dict[RateName, float] = {
    "dispatch": 0.3, "any_unit": 1e-6, "matvec": 119, "half": 60, "memory": 50, "border": 10,
    "sort": 50, "compute": 4, "host": 0.6,
}  # fmt: skip
"""The start values of the fit. `compute` is in T/s; `host`, in ms, keeps its value."""
HOST = "CoreML-LLM rows 5, 8, 21: embedding rows 0.4 ms, masks 0.2 to 0.4"
SMOOTH = 0.02
"""Relative errors below this are squared, not absolute."""
ROUNDS = 4
"""Rounds of choosing whether reading or multiplying bounds weights; two are enough."""
MOST_ROUNDS = 300
"""The most rounds of `robust`, which ends when its solution settles."""
SHARE = 0.8
"""The share of the left-out steps whose errors lie between `Errors.low` and `Errors.high`."""

COMMAND = "python -m cetane.perf.fit --write"

Matrix = npt.NDArray[np.float64]


def starting_rates() -> dict[RateName, Rate]:
    """The rates of `START`."""
    units = {**FITTED, "compute": "T/s", "host": "ms"}
    return {name: rate(name, START[name], units[name], "start") for name in START}


def rate(name: RateName, value: float, unit: str, source: str, low: float | None = None,
         high: float | None = None) -> Rate:  # fmt: skip
    """A fitted rate; the host's is measured."""
    kind = "measured" if name == "host" else "fitted"
    low, high = (value if low is None else low), (value if high is None else high)
    return Rate.model_validate(
        {"value": value, "unit": unit, "kind": kind, "low": low, "high": high, "source": source}
    )


def fit_rates(measurements: Sequence[Measurement]) -> dict[RateName, Rate]:
    """The rates of `DEFAULT_CHIP` that fit these measurements best. A rate without measurements
    keeps its start."""
    rates = starting_rates()
    decode = [m for m in measurements if m.kind in ("step", "part")]
    for _ in range(ROUNDS):
        for name, value in solve(decode, rates).items():
            rates[name] = rate(name, value, FITTED[name], "fit")
        speeds = [
            speed
            for m in measurements
            if m.kind == "prefill" and (speed := compute_speed(m, rates)) is not None
        ]
        if speeds:
            rates["compute"] = rate("compute", float(np.median(speeds)), "T/s", "fit")
    return rates


def compute_speed(measurement: Measurement, rates: Rates) -> float | None:
    """The `compute` of `DEFAULT_CHIP`, in T/s, at which a prefill takes as long as it was measured.

    None if its other work alone takes as long, or if it computes nothing.
    """
    own = on_chip(rates, measurement.chip, find_chip(DEFAULT_CHIP))
    costs = costs_of(own)
    used = [usage(work, costs) for work in measurement.works]
    macs = sum(use.get("compute", 0) for use in used)
    rest = sum(amount * costs[n] for use in used for n, amount in use.items() if n != "compute")
    peak = own["compute"].value / rates["compute"].value
    if not macs or measurement.ms <= rest:
        return None
    return macs / (measurement.ms - rest) * 1e-9 / peak


def solve(decode: Sequence[Measurement], rates: Rates) -> dict[RateName, float]:
    """One round: the values of the fitted rates, with the current bounds of weights.

    It leaves out rates without measurements, and rates whose cost becomes zero.
    """
    if not decode:
        return {}
    base = find_chip(DEFAULT_CHIP)
    names = list(FITTED)
    columns = np.zeros((len(decode), len(names)))
    known = np.zeros(len(decode))
    for row, m in enumerate(decode):
        costs = costs_of(on_chip(rates, m.chip, base))
        for work in m.works:
            for name, amount in usage(work, costs).items():
                if name in FITTED:
                    columns[row, names.index(name)] += amount
                else:
                    known[row] += amount * costs[name]
    times = np.array([m.ms for m in decode])
    groups = [m.group for m in decode]
    weights = np.array([groups.count(group) ** -0.5 for group in groups])
    measured = np.flatnonzero(columns.any(axis=0))
    scale = (columns[:, measured] / times[:, None]).max(axis=0)
    solved = (
        robust(columns[:, measured] / times[:, None] / scale, 1 - known / times, weights) / scale
    )
    return {
        names[column]: value_of(FITTED[names[column]], cost)
        for column, cost in zip(measured, solved, strict=True)
        if cost > 0
    }


def value_of(unit: str, cost: float) -> float:
    """The value of a rate in its unit; `cost` is milliseconds for one unit of work."""
    return {"ms": cost, "ns": cost * 1e6, "GB/s": 1e-6 / cost, "G/s": 1e-6 / cost}[unit]


def robust(columns: Matrix, wanted: Matrix, weights: Matrix) -> Matrix:
    """`x >= 0` with the least sum of weighted absolute errors of `columns @ x`, smoothed."""
    scaled = weights.copy()
    solution = np.zeros(columns.shape[1])
    for _ in range(MOST_ROUNDS):
        before = solution
        solution = nonnegative(columns * np.sqrt(scaled)[:, None], wanted * np.sqrt(scaled))
        error = np.abs(columns @ solution - wanted)
        scaled = weights / np.maximum(error, SMOOTH)
        if np.allclose(solution, before, rtol=1e-7, atol=1e-12):
            break
    return solution


def nonnegative(columns: Matrix, wanted: Matrix) -> Matrix:
    """Least squares with `x >= 0`, coordinate by coordinate, which suffices for a few columns."""
    gram, target = columns.T @ columns, columns.T @ wanted
    solution = np.zeros(len(target))
    for _ in range(20_000):
        largest = 0.0
        for i in range(len(solution)):
            new = max(0.0, solution[i] + (target[i] - gram[i] @ solution) / gram[i, i])
            largest, solution[i] = max(largest, abs(new - solution[i])), new
        if largest < 1e-12:
            break
    return solution


@dataclass(frozen=True)
class PredictedMeasurement:
    """A measurement with its prediction, in milliseconds."""

    measurement: Measurement
    predicted: float

    @property
    def error(self) -> float:
        """The error relative to the measurement; negative if it took longer than predicted."""
        return self.predicted / self.measurement.ms - 1


def predicted(measurements: Collection[Measurement], rates: Rates) -> list[PredictedMeasurement]:
    """Measurements with their predictions by these rates."""
    base = find_chip(DEFAULT_CHIP)
    return [
        PredictedMeasurement(m, total(terms(m.works, costs_of(on_chip(rates, m.chip, base)))))
        for m in measurements
    ]


@dataclass(frozen=True)
class LeftOut:
    """The rates fitted without a group, and their predictions for it."""

    group: str
    rates: Mapping[RateName, Rate]
    predictions: list[PredictedMeasurement]


def leave_one_group_out(measurements: Sequence[Measurement]) -> list[LeftOut]:
    """Every group, predicted from all others."""
    left_out = []
    for group in sorted({m.group for m in measurements if m.kind in ("step", "part")}):
        rates = fit_rates([m for m in measurements if m.group != group])
        mine = [m for m in measurements if m.group == group]
        left_out.append(LeftOut(group, rates, predicted(mine, rates)))
    return left_out


def errors(left_out: Sequence[LeftOut]) -> Errors:
    """The errors of left-out steps."""
    predictions = [prediction for one in left_out for prediction in one.predictions]
    steps = [prediction for prediction in predictions if prediction.measurement.kind == "step"]
    ratios = np.array([step.measurement.ms / step.predicted for step in steps])
    low, high = np.quantile(ratios, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return Errors(
        low=float(low),
        high=float(high),
        median=float(np.median([abs(step.error) for step in steps])),
        rows=len(steps),
        share=SHARE,
    )


def fit(measurements: Sequence[Measurement]) -> Fit:
    """The content of `data/rates.toml`."""
    rates, left_out = fit_rates(measurements), leave_one_group_out(measurements)
    final: dict[RateName, Rate] = {}
    for name, own in rates.items():
        if name == "host":
            final[name] = rate(name, START[name], "ms", HOST)
            continue
        others = [one.rates[name].value for one in left_out]
        values = [own.value, *(value for value in others if value != START[name])]
        kind = "prefill rows" if name == "compute" else "decode rows"
        source = f"fit to the {kind} of data/evidence"
        final[name] = rate(name, own.value, own.unit, source, min(values), max(values))
    return Fit(chip=DEFAULT_CHIP, command=COMMAND, errors=errors(left_out), rates=final)


def toml_text(fit: Fit) -> str:
    """The fit as the text of `data/rates.toml`, with figures to five digits."""
    return f"# Made by {fit.command}: do not edit.\n" + tomli_w.dumps(rounded(fit.model_dump()))


def rounded(content: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers to five digits, at any depth."""
    return {
        key: rounded(value)
        if isinstance(value, Mapping)
        else float(f"{value:.5g}")
        if isinstance(value, float)
        else value
        for key, value in content.items()
    }


def main() -> None:
    """Print the fit; with `--write` renew `data/rates.toml`. Other arguments are CSV files."""
    files = [Path(name) for name in sys.argv[1:] if name != "--write"]
    measurements, _ = read([*shipped(), *files])
    made = fit(measurements)
    print(toml_text(made), end="")
    if "--write" in sys.argv[1:]:
        path = Path(__file__).parents[1] / "data" / "rates.toml"
        path.write_text(toml_text(made), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except CetaneError as error:
        sys.exit(str(error))
