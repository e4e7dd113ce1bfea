"""The cost model: the work of a call, and the physical rates that turn it into milliseconds.

All models share the rates. The time of a program is the sum of

- *dispatch*: one call of Core ML;
- *weights*: the slowest of three times. The first streams their bytes (`bytes`). The second
  multiplies each with one column, at one rate for 8 bits and fewer. The third computes T columns
  (both are `MACs`);
- *KV*: reads of keys and values, one copy for each query head; copies of the cache inside the
  program; and tensors that cross the program's border, which is slow;
- *host*: embedding rows, masks and sampling.

`data/rates.toml` tells which rates are measured and which fitted; `docs/explanation/cost-model.md`
explains how.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from pydantic import Field

from cetane.errors import CetaneError
from cetane.files import shipped_text
from cetane.hardware.chips import Chip, ChipFigure
from cetane.validation import Data, parse_toml, validated

Term = Literal["dispatch", "bytes", "MACs", "KV", "host"]
RateName = Literal[
    "dispatch",
    "any_unit",
    "matvec",
    "half",
    "stream",
    "compute",
    "memory",
    "border",
    "sort",
    "host",
]
"""What a rate is for:

- `dispatch`: calls;
- `any_unit`: calls of a program with states that was loaded for all compute units, beside
  `dispatch`;
- `matvec`: weights of 8 bits and fewer, by their number;
- `half`: wider weights, by their bytes;
- `stream`: weights of any width, by their bytes, where this takes longer than the two above;
- `compute`: multiply-accumulates, where they take longer than the weights;
- `memory`: bytes of caches;
- `border`: bytes of inputs and outputs;
- `sort`: logits that are sorted;
- `host`: tokens.
"""
TERM_OF: dict[RateName, Term] = {
    "dispatch": "dispatch",
    "any_unit": "dispatch",
    "stream": "bytes",
    "half": "bytes",
    "matvec": "MACs",
    "compute": "MACs",
    "memory": "KV",
    "border": "KV",
    "sort": "host",
    "host": "host",
}


@dataclass(frozen=True)
class Work:
    """The work of one program in one call, or of the host between calls (`calls = 0`)."""

    calls: float = 1
    any_unit: float = 0
    """Calls of a program with states that was loaded for all compute units, not for CPU and ANE."""
    tokens: int = 1
    """Columns of a call, T."""
    weights: Mapping[float, float] = field(default_factory=dict)
    """The number of weights, by their bits."""
    attention_macs: float = 0
    """Multiply-accumulates of attention, which has no weights."""
    memory: float = 0
    """Bytes of keys, values and their copies that the program moves."""
    border: float = 0
    """Bytes of inputs and outputs."""
    sorted: float = 0
    """Logits that the host sorts for sampling. Greedy decoding sorts none."""
    host: float = 0
    """Tokens for which the host looks up an embedding and makes masks."""

    def times(self, count: float) -> "Work":
        """The work of `count` calls of the same program."""
        return replace(
            self,
            calls=self.calls * count,
            any_unit=self.any_unit * count,
            weights={bits: n * count for bits, n in self.weights.items()},
            attention_macs=self.attention_macs * count,
            memory=self.memory * count,
            border=self.border * count,
            sorted=self.sorted * count,
            host=self.host * count,
        )


class Rate(Data):
    """A rate of the model. Times are `quantity / value`; for `ms` and `ns`, `quantity * value`."""

    value: float = Field(gt=0, allow_inf_nan=False)
    unit: Literal["GB/s", "G/s", "T/s", "ms", "ns"]
    kind: Literal["fitted", "measured", "published"]
    low: float
    high: float
    """`low` and `high`: the range of a fitted rate when one group of measurements is left out."""
    source: str

    @property
    def ms(self) -> float:
        """Milliseconds for one byte, weight, multiply-accumulate, call or entry."""
        match self.unit:
            case "GB/s" | "G/s":
                return 1e-6 / self.value
            case "T/s":
                return 1e-9 / self.value
            case "ms":
                return self.value
            case _:
                return self.value * 1e-6


Rates = Mapping[RateName, Rate]
Costs = Mapping[RateName, float]
"""Milliseconds for one unit of work, by rate."""


def costs_of(rates: Rates) -> dict[RateName, float]:
    """Milliseconds for one unit of work, by rate."""
    return {name: rate.ms for name, rate in rates.items()}


class Errors(Data):
    """The errors of predictions for left-out measurements: quantiles of measured / predicted."""

    low: float = Field(gt=0)
    high: float = Field(gt=0)
    median: float
    """Median absolute relative error, predicted against measured."""
    rows: int
    share: float
    """The share of rows between `low` and `high`."""


class Fit(Data):
    """The content of `data/rates.toml`: the rates of the fitted chip, and their errors."""

    chip: str
    command: str
    errors: Errors
    rates: dict[RateName, Rate]


@cache
def load_fit() -> Fit:
    """The fit that ships with cetane."""
    return parse_fit(shipped_text("data/rates.toml"))


def parse_fit(text: str) -> Fit:
    """A fit from TOML. A CetaneError names the error in it."""
    fit = validated(Fit, parse_toml(text, "rates.toml"), "rates.toml")
    missing = set(TERM_OF) - set(fit.rates) - {"stream"}
    if missing:
        raise CetaneError(f"rates.toml: no rate {min(missing)}")
    return fit


def on_chip(rates: Rates, chip: Chip, fitted_on: Chip) -> dict[RateName, Rate]:
    """The rates of a chip.

    It streams at its own rate, and computes in proportion to the published peaks. Other rates are
    as fitted, since the measured chips do not differ in them.
    """
    own, peak, base = chip.figure("stream"), chip.figure("compute"), fitted_on.figure("compute")
    compute = rates["compute"]
    if chip.id != fitted_on.id:
        ratio = peak.value / base.value
        compute = Rate(
            value=ratio * compute.value, unit=compute.unit, kind=compute.kind,
            low=ratio * compute.low, high=ratio * compute.high,
            source=f"{compute.source}; times {chip.id}'s peak, {cite(peak)}",
        )  # fmt: skip
    stream = Rate(
        value=own.value, unit="GB/s", kind="published", low=own.value, high=own.value,
        source=cite(own),
    )  # fmt: skip
    return {**rates, "stream": stream, "compute": compute}


def cite(figure: ChipFigure) -> str:
    """A figure's source, with the chip that it was borrowed from."""
    borrowed = f"borrowed from {figure.of}: " if figure.of else ""
    return f"{borrowed}{figure.source} ({figure.date})"


def usage(work: Work, costs: Costs) -> dict[RateName, float]:
    """The amounts of work that a program gives to each rate, in bytes, weights, calls or entries.

    They are linear in the work, but for the choice of what bounds the weights.
    """
    used: dict[RateName, float] = {}
    streaming = 0.0
    for bits, count in work.weights.items():
        size = count * bits / 8
        name: RateName
        name, amount = ("half", size) if bits > 8 else ("matvec", count)
        if size * costs["stream"] > amount * costs[name]:
            name, amount = "stream", size
        used[name] = used.get(name, 0) + amount
        streaming += amount * costs[name]
    macs = sum(work.weights.values()) * work.tokens + work.attention_macs
    if macs * costs["compute"] > streaming:
        used = {"compute": macs}
    used["dispatch"] = work.calls
    used["any_unit"] = work.any_unit
    used["memory"] = work.memory
    used["border"] = work.border
    used["sort"] = work.sorted
    used["host"] = work.host
    return used


def terms(works: Iterable[Work], costs: Costs) -> dict[Term, float]:
    """Milliseconds of programs that are called one after another, by term."""
    amounts: dict[Term, float] = dict.fromkeys(TERM_OF.values(), 0.0)
    for work in works:
        for name, amount in usage(work, costs).items():
            amounts[TERM_OF[name]] += amount * costs[name]
    return amounts


def total(amounts: Mapping[Any, float]) -> float:
    """The milliseconds of all terms."""
    return sum(amounts.values())
