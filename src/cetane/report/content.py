"""What a page says, as data: every figure that the page shows is in here, and nothing is computed
while it is drawn. The same data is written as JSON beside the page."""

from typing import Literal

from cetane.gates.residency.rule import Placement
from cetane.validation import Data

Outcome = Literal["passed", "failed", "not run"]


class Absent(Data):
    """A section without data, and the command that makes it."""

    kind: Literal["absent"] = "absent"
    why: str
    command: str


class Checked(Data):
    """A figure that a gate held against a limit."""

    name: str
    value: float
    limit: float
    passed: bool


class Verdict(Data):
    """What a gate said."""

    gate: str
    question: str
    outcome: Outcome
    basis: str
    """Measured on the programs, or predicted by rules."""
    command: str
    """Runs it."""
    date: str | None = None
    """When its result was written, UTC."""
    notes: tuple[str, ...] = ()
    held: int = 0
    """How many of the checks passed."""
    count: int = 0
    checks: tuple[Checked, ...] = ()


class Column(Data):
    """A block of a shard; experts that tokens are sent to have a column for all of them."""

    shard: str
    block: str


class Cell(Data):
    """Ops of one kind in one block: how many are placed where, and by which rules."""

    placed: dict[Placement, int]
    rules: tuple[str, ...]


class KindRow(Data):
    """One kind of op in every block, None where a block has none."""

    kind: str
    ops: int
    cells: tuple[Cell | None, ...]


class PlacementMap(Data):
    """One mode: kinds of op by blocks."""

    mode: str
    tokens: int
    ops: int
    placed: dict[Placement, int]
    columns: tuple[Column, ...]
    rows: tuple[KindRow, ...]


class Reason(Data):
    """A rule, or evidence, that placed ops."""

    rule: str
    placement: Placement
    confidence: str
    ops: int
    kinds: tuple[str, ...]
    message: str
    fix: str
    source: str


class Residency(Data):
    """Where ops run, and why."""

    target: str
    basis: str
    """Predicted, measured, or some of each."""
    weights_off_ane: float
    maps: tuple[PlacementMap, ...]
    reasons: tuple[Reason, ...]


class PositionRow(Data):
    """A tensor that a shard hands on: its cosine with the reference at every position."""

    shard: str
    tensor: str
    mode: str
    cosine: float
    """Smallest of the probes' means."""
    worst: float
    worst_at: int | None
    values: tuple[float, ...]
    """The smallest of `per_column` positions each."""


class Positions(Data):
    """Agreement with the reference, by shard and position."""

    kind: Literal["positions"] = "positions"
    per_column: int
    positions: int
    rows: tuple[PositionRow, ...]


class BlockRange(Data):
    """The largest magnitude of the residual stream after a block."""

    block: str
    largest: float


class Ranges(Data):
    """The residual stream against the end of fp16."""

    kind: Literal["ranges"] = "ranges"
    end: float
    near: float
    """Beyond it a block is worth a warning."""
    largest: BlockRange
    share: float
    """Of the largest, of the end."""
    blocks: tuple[BlockRange, ...]


class ShardSize(Data):
    """What a file, or the files of a shard, take on disk."""

    name: str
    bytes: int
    share: float
    """Of the largest."""
    weights: int | None = None
    bits: float | None = None
    """A stored weight takes on average, scales and palettes counted."""


class Sizes(Data):
    """Bytes on disk."""

    bytes: int
    weights: int
    mean_bits: float
    """Scales and palettes not counted."""
    parts: tuple[ShardSize, ...]
    caches: dict[int, int]
    """Bytes of the key/value cache by context length."""


class Perplexity(Data):
    """The bundle beside the reference on a text."""

    kind: Literal["perplexity"] = "perplexity"
    text: str
    tokens: int
    value: float
    reference: float
    ratio: float
    limit: float
    kl: float
    top1: float


class Answer(Data):
    """An answer to a smoke prompt; whether an expected word is in it, where one is expected."""

    id: str
    text: str
    expected: bool | None


class QualityPoint(Data):
    """One format of a sweep."""

    name: str
    method: str
    bits: float
    """Per weight, scales and palettes counted."""
    bytes: int
    perplexity: float
    ratio: float
    """Of the perplexity to that of the fp16 weights."""
    kl: float
    top1: float
    cosine: float | None
    """The worst shard's."""
    tok_s: float
    """Predicted."""
    off_ane: float
    """Share of the weights, predicted."""
    best: bool
    """Whether no other point is as small and as good."""
    smoke: tuple[Answer, ...] = ()


class Quality(Data):
    """Quality against bits, of a sweep."""

    kind: Literal["quality"] = "quality"
    model: str
    text: str
    tokens: int
    points: tuple[QualityPoint, ...]


class Drafted(Data):
    """A drafter on the prompts of one category."""

    category: str
    drafter: str
    tokens: int
    plain: float
    """Tokens a second without drafts."""
    speculative: float
    ratio: float
    acceptance: float | None
    tokens_per_call: float | None
    same: bool


class Speculation(Data):
    """Drafts against plain decoding, measured by `cetane bench`."""

    kind: Literal["speculation"] = "speculation"
    bundle: str
    draft_tokens: int
    longest: float
    """The end of the axis of ratios."""
    ticks: tuple[float, ...]
    drafters: tuple[str, ...]
    ours: bool
    """Whether it names this bundle."""
    calls: dict[int, float]
    """Milliseconds of a call by its tokens."""
    rows: tuple[Drafted, ...]


class PredictedStep(Data):
    """One step of a mode."""

    mode: str
    tokens: int
    context: int
    ms: float
    low: float | None
    high: float | None
    tok_s: float
    binds: str
    terms: dict[str, float]
    """Milliseconds of each term, which overlap nowhere."""


class Predicted(Data):
    """Time by the cost model: predicted, never measured."""

    kind: Literal["predicted"] = "predicted"
    chip: str
    longest: float
    """The end of the axis, ms."""
    terms: tuple[str, ...]
    modes: tuple[PredictedStep, ...]
    contexts: tuple[PredictedStep, ...]
    """The same decode step at other contexts."""
    within: float | None
    """Share of the steps of left-out models whose measured time was in the interval."""
    steps: int
    median: float | None
    """Half of them erred by less."""


class Fact(Data):
    """A line of provenance."""

    name: str
    value: str
    href: str | None = None


class Figure(Data):
    """A figure at the head of a page."""

    name: str
    value: float
    unit: str
    note: str = ""


class BundleReport(Data):
    """The page of a bundle."""

    kind: Literal["bundle"] = "bundle"
    schema_version: Literal[1] = 1
    title: str
    subtitle: str
    outcome: Outcome
    head: tuple[Figure, ...]
    verdicts: tuple[Verdict, ...]
    residency: Residency
    positions: Positions | Absent
    ranges: Ranges | Absent
    sizes: Sizes
    perplexity: Perplexity | Absent
    quality: Quality | Absent
    speculation: Speculation | Absent
    predicted: Predicted | Absent
    provenance: tuple[Fact, ...]


class Value(Data):
    """A metric of one arm. `low` and `high` are quartiles of what was measured `n` times, or the
    interval of a prediction."""

    value: float | None
    low: float | None
    high: float | None
    kind: str
    n: int
    note: str


class Compared(Data):
    """A metric of both arms."""

    metric: str
    about: str
    unit: str
    baseline: Value | None
    candidate: Value | None
    ratio: float | None
    """Candidate to baseline."""
    longest: float
    """The end of the axis of both."""


class GateValue(Data):
    """A gate of an experiment, and the value that it saw."""

    metric: str
    arm: str
    least: float | None
    most: float | None
    value: float | None
    passed: bool


class Reported(Data):
    """A figure as the original gives it."""

    what: str
    baseline: str
    candidate: str
    source: str


class RunRow(Data):
    """One run."""

    run: str
    at: str
    """When it started, UTC."""
    status: str
    seconds: float | None
    error: str


class Curve(Data):
    """Points `(x, y)` by arm."""

    name: str
    lines: dict[str, tuple[tuple[float, float], ...]]


class Text(Data):
    """What both arms wrote."""

    name: str
    baseline: str
    candidate: str


class ExperimentReport(Data):
    """The page of an experiment; the figures are those of its last run with an outcome."""

    kind: Literal["experiment"] = "experiment"
    schema_version: Literal[1] = 1
    title: str
    subtitle: str
    status: str
    """A word of the decision log's legend."""
    outcome: str
    """Of the last run."""
    hypothesis: str
    expects: tuple[str, ...]
    decided: str
    """The verdict's reason; empty if there is none."""
    decide: str
    """The command that gives one."""
    obituary: str
    remarks: dict[str, str]
    """Whatever else was written about it, by what that is."""
    reported: tuple[Reported, ...]
    figures: tuple[Compared, ...] | Absent
    gates: tuple[GateValue, ...]
    texts: tuple[Text, ...]
    curves: tuple[Curve, ...]
    runs: tuple[RunRow, ...]
    provenance: tuple[Fact, ...]
