"""The content of a bundle's page, as data.

It holds every figure of the page: drawing computes nothing. The same data is written as JSON beside
the page.
"""

from typing import Literal

from cetane.evaluation.figures import TaskFigure
from cetane.gates.residency.rule import Placement
from cetane.gates.verdict import Check
from cetane.validation import Data

Judgement = Literal["passed", "failed", "not run"]


class Absent(Data):
    """A section without data, and the command that makes it."""

    kind: Literal["absent"] = "absent"
    why: str
    command: str


class GateVerdict(Data):
    """A gate's verdict on the bundle."""

    gate: str
    question: str
    outcome: Judgement
    basis: str
    """`measured` on the programs, or `predicted` by rules."""
    command: str
    """The command that runs it."""
    repeatable: bool
    """Whether the command judges this bundle again. Others judge a bundle while they make it."""
    date: str | None = None
    """The time of its result, in UTC."""
    notes: tuple[str, ...] = ()
    held: int = 0
    """The number of checks that passed."""
    count: int = 0
    checks: tuple[Check, ...] = ()


class Column(Data):
    """A block of a shard. All experts to which tokens are routed share a column."""

    shard: str
    block: str


class Cell(Data):
    """Ops of one kind in one block: their number by place, and the rules that placed them."""

    placed: dict[Placement, int]
    rules: tuple[str, ...]


class KindRow(Data):
    """One kind of op in every block; None if a block has no such op."""

    kind: str
    ops: int
    cells: tuple[Cell | None, ...]


class PlacementMap(Data):
    """The map of one mode: kinds of op by blocks."""

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
    """The places where ops run, and the reasons."""

    target: str
    basis: str
    """Predicted, measured, or some of each."""
    weights_off_ane: float
    maps: tuple[PlacementMap, ...]
    reasons: tuple[Reason, ...]


class PositionRow(Data):
    """An output tensor of a shard: its cosine with the reference at every position."""

    shard: str
    tensor: str
    mode: str
    cosine: float
    """The smallest of the probes' means."""
    worst: float
    worst_at: int | None
    values: tuple[float, ...]
    """The smallest cosines of every `per_column` positions."""


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
    """The residual stream, compared with the largest fp16 number."""

    kind: Literal["ranges"] = "ranges"
    end: float
    near: float
    """The magnitude from which a block gets a warning."""
    largest: BlockRange
    share: float
    """The largest magnitude, divided by `end`."""
    blocks: tuple[BlockRange, ...]


class PartSize(Data):
    """The size on disk of a part: a file, or a shard's files."""

    name: str
    bytes: int
    share: float
    """Its bytes, divided by those of the largest part."""
    weights: int | None = None
    bits: float | None = None
    """The mean bits of a stored weight, with scales and palettes."""


class DiskUse(Data):
    """Bytes on disk."""

    bytes: int
    weights: int
    mean_bits: float
    """The mean bits of a stored weight, with scales and palettes."""
    parts: tuple[PartSize, ...]
    caches: dict[int, int]
    """Bytes of the key/value cache, by context length."""


class Perplexity(Data):
    """The perplexities of the bundle and of the reference on a text."""

    kind: Literal["perplexity"] = "perplexity"
    text: str
    tokens: int
    value: float
    reference: float
    ratio: float
    limit: float
    kl: float
    top1: float


class Tasks(Data):
    """The figures of an evaluation."""

    kind: Literal["tasks"] = "tasks"
    figures: tuple[TaskFigure, ...]
    limit: int | None
    fewshot: int | None
    """The number of examples before each sample; None if each task chose."""
    chat: bool
    """Whether the requests were turns of a conversation."""
    compared: bool
    """Whether the reference answered the same requests."""
    nats: float | None
    warnings: tuple[str, ...]


class SweepAnswer(Data):
    """An answer to a smoke prompt."""

    id: str
    text: str
    expected: bool | None
    """Whether the answer has an expected word; None if no word is expected."""


class SweepPoint(Data):
    """One format of a sweep."""

    name: str
    method: str
    bits: float
    """Bits per weight, with scales and palettes."""
    bytes: int
    perplexity: float
    ratio: float
    """The perplexity, divided by that of the fp16 weights."""
    kl: float
    top1: float
    cosine: float | None
    """The worst shard's cosine."""
    target: str
    """The chip and the system that the next two are predicted for: a sweep of another chip may have
    judged only some of the points."""
    tok_s: float
    off_ane: float
    """The predicted share of weights that are read off the ANE."""
    best: bool
    """Whether no other point is as small and as good."""
    smoke: tuple[SweepAnswer, ...] = ()


class SweepQuality(Data):
    """The quality of a sweep's formats against their bits."""

    kind: Literal["quality"] = "quality"
    model: str
    text: str
    tokens: int
    points: tuple[SweepPoint, ...]


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
    outcome: Judgement
    rows: tuple[DeviceRow, ...]
    rules: tuple[RefutedRule, ...]
    measured_ops: int
    ties: int
    positions: int
    faults: tuple[str, ...]
    caveats: tuple[str, ...]


class TensorRow(Data):
    """One input, output or state of a function."""

    direction: Literal["input", "output", "state"]
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    """The app's part: the input that it gives, or its use of the output."""


class CallSignature(Data):
    """Functions that take and give the same tensors."""

    shards: tuple[str, ...]
    functions: tuple[str, ...]
    tokens: int
    tensors: tuple[TensorRow, ...]


class CallOrder(Data):
    """The steps of a call of a mode, in order: an app calls a function in each."""

    mode: str
    tokens: int
    calls: tuple[str, ...]


class FileRow(Data):
    """A file of the bundle, or a folder that belongs together."""

    path: str
    bytes: int
    holds: str


class MemoryRow(Data):
    """Memory that an app keeps, in bytes."""

    name: str
    bytes: int
    note: str


class ForDevelopers(Data):
    """The facts that the developer of an app needs."""

    context: int
    """The number of tokens for which the caches have room."""
    deployment: str
    """The oldest system that loads the bundle."""
    files: tuple[FileRow, ...]
    calls: tuple[CallOrder, ...]
    interfaces: tuple[CallSignature, ...]
    memory: tuple[MemoryRow, ...]
    total: int
    """Bytes of all rows of memory."""


class Fact(Data):
    """A line of provenance."""

    name: str
    value: str


class KeyFigure(Data):
    """A large figure at the top of a page."""

    name: str
    value: float
    unit: str
    basis: Literal["measured", "predicted"]
    better: Literal["lower", "higher"]
    limit: float | None = None
    """The limit of its gate, in the same unit; None without a gate."""
    low: float | None = None
    high: float | None = None
    """The interval of a prediction."""
    note: str = ""

    @property
    def holds(self) -> bool | None:
        """Whether the value is within its limit; None without a limit."""
        if self.limit is None:
            return None
        return self.value >= self.limit if self.better == "higher" else self.value <= self.limit


class BundleReport(Data):
    """The page of a bundle."""

    kind: Literal["bundle"] = "bundle"
    schema_version: Literal[3] = 3
    title: str
    """The model's name."""
    date: str
    """The day on which the bundle was judged, else written; in UTC."""
    folder: str
    architecture: str
    recipe: str
    outcome: Judgement
    figures: tuple[KeyFigure, ...]
    verdicts: tuple[GateVerdict, ...]
    residency: Residency
    positions: Positions | Absent
    ranges: Ranges | Absent
    sizes: DiskUse
    developers: ForDevelopers
    perplexity: Perplexity | Absent
    tasks: Tasks | Absent
    quality: SweepQuality | Absent
    speculation: DraftBench | Absent
    predicted: CallTimes | Absent
    device: OnDevice | Absent
    provenance: tuple[Fact, ...]
