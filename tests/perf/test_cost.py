"""The model of a call, by hand."""

import pytest

from cetane.errors import CetaneError
from cetane.hardware.chips import find_chip
from cetane.perf.cost import (
    TERM_OF,
    Costs,
    Rate,
    Work,
    costs_of,
    load_fit,
    on_chip,
    parse_fit,
    terms,
    total,
)

COSTS: Costs = {
    "dispatch": 0.5,
    "any_unit": 2.0,
    "stream": 1e-8,  # 100 GB/s
    "half": 2e-8,  # 50 GB/s
    "matvec": 1e-8,  # 100 G weights/s
    "compute": 2.5e-10,  # 4 T/s
    "memory": 2e-8,
    "border": 1e-7,
    "sort": 5e-5,
    "host": 0.6,
}


def rate(value: float, unit: str) -> Rate:
    return Rate.model_validate(
        {"value": value, "unit": unit, "kind": "fitted", "low": 1, "high": 1, "source": "x"}
    )


@pytest.mark.parametrize(
    ("unit", "value", "amount", "ms"),
    [
        ("GB/s", 100, 100e6, 1),  # 100 MB at 100 GB/s
        ("G/s", 120, 120e6, 1),
        ("T/s", 4, 4e9, 1),
        ("ms", 0.22, 10, 2.2),
        ("ns", 50, 20_000, 1),
    ],
)
def test_units(unit: str, value: float, amount: float, ms: float) -> None:
    assert amount * rate(value, unit).ms == pytest.approx(ms)


@pytest.mark.parametrize(
    ("work", "wanted"),
    [
        (Work(calls=3), {"dispatch": 1.5}),
        (Work(any_unit=1), {"dispatch": 2.5}),
        (Work(weights={8: 200e6}), {"dispatch": 0.5, "bytes": 0, "MACs": 2}),
        (Work(weights={4: 200e6}), {"dispatch": 0.5, "MACs": 2}),  # fewer bits: no faster
        (Work(weights={16: 200e6}), {"dispatch": 0.5, "bytes": 8}),  # 400 MB at 50 GB/s
        (Work(weights={8: 200e6}, tokens=4), {"dispatch": 0.5, "MACs": 2}),  # T = 4 is free
        (Work(weights={8: 200e6}, tokens=64), {"dispatch": 0.5, "MACs": 3.2}),
        (Work(tokens=1, attention_macs=4e9), {"dispatch": 0.5, "MACs": 1}),
        (Work(memory=1e6, border=1e6), {"dispatch": 0.5, "KV": 0.12}),
        (Work(calls=0, sorted=100_000, host=1), {"host": 5.6}),
    ],
)
def test_terms(work: Work, wanted: dict[str, float]) -> None:
    found = terms([work], COSTS)
    assert found == pytest.approx(dict.fromkeys(TERM_OF.values(), 0) | wanted)
    assert total(found) == pytest.approx(sum(wanted.values()))


def test_bytes_bind_where_the_stream_is_slower_than_the_multiplier() -> None:
    slow = {**COSTS, "stream": 2e-8}
    assert terms([Work(calls=0, weights={8: 100e6})], slow)["bytes"] == pytest.approx(2)
    assert terms([Work(calls=0, weights={4: 100e6})], slow)["MACs"] == pytest.approx(1)


def test_a_program_called_twice_costs_twice() -> None:
    work = Work(weights={8: 3e6, 16: 2e6}, tokens=40, attention_macs=7, memory=5, border=3,
                sorted=2, host=1, any_unit=1)  # fmt: skip
    assert total(terms([work.times(2)], COSTS)) == pytest.approx(total(terms([work, work], COSTS)))


def test_the_rates_of_another_chip() -> None:
    fit = load_fit()
    base = find_chip(fit.chip)
    own = costs_of(on_chip(fit.rates, base, base))
    other = on_chip(fit.rates, find_chip("m1"), base)
    assert other["stream"].value == 60.9 and other["stream"].kind == "published"
    # in proportion to the published peaks, 2.7 and 10.9 TFLOP/s
    for end in ("value", "low", "high"):
        wanted = getattr(fit.rates["compute"], end) * 2.7 / 10.9
        assert getattr(other["compute"], end) == pytest.approx(wanted)
    assert "aneforge" in other["compute"].source
    assert costs_of(other)["memory"] == own["memory"]
    borrowed = on_chip(fit.rates, find_chip("a19-pro"), base)
    assert "borrowed from m4-max" in borrowed["compute"].source


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("chip = ", "not TOML"), ('chip = "m4-max"', "command"), ("speed = 1", "chip")],
)
def test_bad_rates(text: str, wrong: str) -> None:
    with pytest.raises(CetaneError, match=wrong):
        parse_fit(text)


def test_a_missing_rate() -> None:
    text = (
        'chip = "m4-max"\ncommand = "x"\n[errors]\nlow = 1\nhigh = 1\nmedian = 0\nrows = 1\n'
        "share = 0.8\n[rates]\n"
    )
    with pytest.raises(CetaneError, match="no rate any_unit"):
        parse_fit(text)
