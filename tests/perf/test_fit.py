"""The fit: against rates that are known, with what is left out really left out."""

import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import linprog, nnls

from cetane.hardware.chips import find_chip
from cetane.perf.cost import (
    Rate,
    RateName,
    Work,
    costs_of,
    load_fit,
    on_chip,
    parse_fit,
    terms,
    total,
)
from cetane.perf.evidence import load_evidence
from cetane.perf.fit import (
    START,
    LeftOut,
    PredictedMeasurement,
    errors,
    fit_rates,
    leave_one_group_out,
    nonnegative,
    predicted,
    rate,
    robust,
    starting_rates,
    toml_text,
)  # fmt: skip
from cetane.perf.measurement import Measurement

TRUE: dict[RateName, float] = {
    "dispatch": 0.4, "any_unit": 1.5, "matvec": 105, "half": 40, "memory": 70, "border": 8,
    "sort": 60, "compute": 3, "host": 0.6,
}  # fmt: skip
CHIP = find_chip("m4-max")


def true_rates() -> dict[RateName, Rate]:
    return {n: r.model_copy(update={"value": TRUE[n]}) for n, r in starting_rates().items()}


def measurement(group: str, works: tuple[Work, ...], kind: str = "step") -> Measurement:
    ms = total(terms(works, costs_of(on_chip(true_rates(), CHIP, CHIP))))
    return Measurement("made", "1", group, CHIP, "made", kind, works, ms, "made")  # type: ignore[arg-type]


def synthetic(groups: int = 5, rows: int = 12) -> list[Measurement]:
    draw = random.Random(3)
    made = []
    for group in range(groups):
        for _ in range(rows):
            work = Work(
                calls=draw.randint(1, 80),
                any_unit=draw.randint(0, 8),
                weights={draw.choice([4.0, 8.0, 16.0]): draw.uniform(1e8, 3e9)},
                memory=draw.uniform(0, 2e9),
                border=draw.uniform(0, 2e8),
                sorted=draw.choice([0, 200_000]),
            )
            made.append(measurement(f"model {group}", (work, Work(calls=0, host=1))))
        wide = Work(tokens=512, weights={4: draw.uniform(1e8, 1e9)})
        made.append(measurement(f"model {group}", (wide,), "prefill"))
    return made


def values(rates: dict[RateName, Rate]) -> dict[RateName, float]:
    return {name: one.value for name, one in rates.items()}


def test_known_rates_are_recovered() -> None:
    assert values(fit_rates(synthetic())) == pytest.approx(TRUE, rel=1e-3)


def test_a_few_wrong_rows_change_little() -> None:
    made = synthetic(groups=6, rows=20)
    wrong = [replace(m, ms=m.ms * 3) if index % 10 == 0 else m for index, m in enumerate(made)]
    found = values(fit_rates(wrong))
    for name in ("dispatch", "matvec", "half", "memory", "border"):
        assert found[name] == pytest.approx(TRUE[name], rel=0.05), name


def test_of_what_nothing_tells_the_start_stays() -> None:
    made = [measurement("a", (Work(calls=n, weights={4: 1e9}),)) for n in (1, 5, 9)]
    found = values(fit_rates(made))
    assert found["dispatch"] == pytest.approx(0.4, rel=1e-3)
    assert found["border"] == START["border"]


def test_a_left_out_group_is_left_out() -> None:
    """A model that takes twice as long changes no rate of the fit without it."""
    made = synthetic()
    odd = [replace(m, ms=2 * m.ms) if m.model == "model 2" else m for m in made]
    left = {one.group: one for one in leave_one_group_out(odd)}
    found = left["model 2 / m4-max"]
    assert {n: r.value for n, r in found.rates.items()} == pytest.approx(TRUE, rel=1e-3)
    assert all(c.error == pytest.approx(-0.5, abs=1e-3) for c in found.predictions)
    assert len(left) == 5
    assert sum(len(one.predictions) for one in left.values()) == len(made)


def test_errors_are_quantiles_of_left_out_steps() -> None:
    one = measurement("a", (Work(),))
    ratios = np.linspace(0.9, 1.3, 41)
    checked = [PredictedMeasurement(one, one.ms / ratio) for ratio in ratios]
    parts = [PredictedMeasurement(replace(one, kind="part"), 1000.0)]
    found = errors([LeftOut("a", {}, checked), LeftOut("b", {}, parts)])
    assert (found.rows, found.low, found.high) == (41, pytest.approx(0.94), pytest.approx(1.26))
    assert found.median == pytest.approx(np.median(np.abs(1 / ratios - 1)))


def test_least_squares_against_scipy() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        columns, wanted = draw.random((15, 5)), draw.normal(size=15)
        expected, _ = nnls(columns, wanted)
        np.testing.assert_allclose(nonnegative(columns, wanted), expected, atol=1e-6)


def test_robust_is_near_the_least_absolute_error() -> None:
    draw = np.random.default_rng(1)
    columns = draw.random((60, 3))
    wanted = columns @ [1.0, 2.0, 0.5] + draw.standard_cauchy(60) * 0.05
    found = robust(columns, wanted, np.ones(60))
    cost = np.r_[np.zeros(3), np.ones(120)]
    equal = np.c_[columns, np.eye(60), -np.eye(60)]
    best = linprog(cost, A_eq=equal, b_eq=wanted).fun
    assert np.abs(columns @ found - wanted).sum() <= best * 1.02


def test_what_ships_is_what_the_evidence_gives() -> None:
    """data/rates.toml is the fit to data/evidence: renew it with python -m cetane.perf.fit."""
    measurements, _ = load_evidence()
    shipped = load_fit()
    assert values(fit_rates(measurements)) == pytest.approx(values(shipped.rates), rel=1e-3)
    left_out = leave_one_group_out(measurements)
    found = errors(left_out)
    assert found.model_dump() == pytest.approx(shipped.errors.model_dump(), rel=1e-3)
    assert found.median <= 0.10


def test_rates_are_plausible() -> None:
    """Against figures that the fit does not use: field notes in chips.toml, papers."""
    rates = load_fit().rates
    assert 0.07 <= rates["dispatch"].value <= 0.7  # driver alone; Core ML on a Mac
    assert 100 <= rates["matvec"].value <= 130  # one 8-bit weight a byte: the stream's rate
    assert rates["compute"].value * 2 < 10.9  # TFLOP/s, M4 Max peak
    worst = max(predicted(load_evidence()[0], rates), key=lambda c: abs(c.error))
    assert abs(worst.error) < 0.5


def test_toml_round_trip() -> None:
    shipped = load_fit()
    assert parse_fit(toml_text(shipped)) == shipped


def test_host_is_called_measured() -> None:
    assert rate("host", 0.6, "ms", "x").kind == "measured"
    assert {n for n, r in load_fit().rates.items() if r.kind == "fitted"} == set(START) - {"host"}


def test_a_wrong_file_is_an_error_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cetane.perf.fit", str(tmp_path / "none.csv")]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and f"cannot read {tmp_path / 'none.csv'}" in line
