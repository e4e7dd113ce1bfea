"""Speed, with drafts, predicted and on a device, as data."""

from typing import Literal

from cetane.gates.residency.rule import Placement
from cetane.report.content.verdicts import OutcomeWord
from cetane.validation import Data


class Drafted(Data):
    """The speed of a drafter on the prompts of one category."""

    category: str
    drafter: str
    tokens: int
    plain: float
    """Tokens per second without drafts."""
    speculative: float
    ratio: float
    acceptance: float | None
    tokens_per_call: float | None
    same: bool


JudgedBy = Literal["clock", "calls"]


class DraftBench(Data):
    """Drafts against plain decoding, measured by `cetane bench`."""

    kind: Literal["speculation"] = "speculation"
    bundle: str
    draft_tokens: int
    longest: float
    """The end of the axis of ratios."""
    ticks: tuple[float, ...]
    drafters: tuple[str, ...]
    ours: bool
    """Whether it measured this bundle."""
    passed: bool
    """Whether all tokens are those of plain decoding, and no category became slower."""
    judged_by: JudgedBy
    """What judged the speed: the clock, or the number of calls where the machine was busy."""
    calls: dict[int, float]
    """Milliseconds of a call, by its number of tokens."""
    rows: tuple[Drafted, ...]


class CallTime(Data):
    """The predicted time of a call of a mode."""

    mode: str
    tokens: int
    context: int
    ms: float
    low: float | None
    high: float | None
    tok_s: float
    binds: str
    terms: dict[str, float]
    """Milliseconds of each term; terms do not overlap."""


class CallTimes(Data):
    """The times of calls by the cost model: predicted, never measured."""

    kind: Literal["predicted"] = "predicted"
    chip: str
    longest: float
    """The end of the axis, in ms."""
    terms: tuple[str, ...]
    modes: tuple[CallTime, ...]
    contexts: tuple[CallTime, ...]
    """The same decode step at other contexts."""
    within: float | None
    """The share of left-out models' steps whose measured time was in the interval."""
    steps: int
    median: float | None
    """The median error of these steps."""


class DeviceRow(Data):
    """A figure of a device, beside its prediction."""

    name: str
    value: float
    unit: str
    predicted: float | None = None
    low: float | None = None
    high: float | None = None


class RefutedRule(Data):
    """A rule that was wrong on the device."""

    rule: str
    predicted: Placement
    wrong: int
    ops: int
    narrow: str


class OnDevice(Data):
    """What a device measured, by a kit."""

    kind: Literal["device"] = "device"
    machine: str
    date: str
    compute_units: str
    outcome: OutcomeWord
    rows: tuple[DeviceRow, ...]
    rules: tuple[RefutedRule, ...]
    measured_ops: int
    ties: int
    positions: int
    faults: tuple[str, ...]
    caveats: tuple[str, ...]
