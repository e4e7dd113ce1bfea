"""What a bundle's page says, as data: every figure that the page shows is in here, and nothing is
computed while it is drawn. The same data is written as JSON beside the page."""

from typing import Literal

from cetane.gates.residency.rule import Placement
from cetane.validation import Data

Judgement = Literal["passed", "failed", "not run"]


class Absent(Data):
    """A section without data, and the command that makes it."""

    kind: Literal["absent"] = "absent"
    why: str
    command: str


class CheckRow(Data):
    """A figure that a gate held against a limit."""

    name: str
    value: float
    limit: float
    passed: bool


class GateVerdict(Data):
    """What a gate said."""

    gate: str
    question: str
    outcome: Judgement
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
    checks: tuple[CheckRow, ...] = ()


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
    """CallTimes, measured, or some of each."""
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


class DiskUse(Data):
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


class SweepAnswer(Data):
    """An answer to a smoke prompt; whether an expected word is in it, where one is expected."""

    id: str
    text: str
    expected: bool | None


class SweepPoint(Data):
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
    """CallTimes."""
    off_ane: float
    """Share of the weights, predicted."""
    best: bool
    """Whether no other point is as small and as good."""
    smoke: tuple[SweepAnswer, ...] = ()


class SweepQuality(Data):
    """Quality against bits, of a sweep."""

    kind: Literal["quality"] = "quality"
    model: str
    text: str
    tokens: int
    points: tuple[SweepPoint, ...]


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
    """Whether it names this bundle."""
    calls: dict[int, float]
    """Milliseconds of a call by its tokens."""
    rows: tuple[Drafted, ...]


class CallTime(Data):
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


class CallTimes(Data):
    """Time by the cost model: predicted, never measured."""

    kind: Literal["predicted"] = "predicted"
    chip: str
    longest: float
    """The end of the axis, ms."""
    terms: tuple[str, ...]
    modes: tuple[CallTime, ...]
    contexts: tuple[CallTime, ...]
    """The same decode step at other contexts."""
    within: float | None
    """Share of the steps of left-out models whose measured time was in the interval."""
    steps: int
    median: float | None
    """Half of them erred by less."""


class TensorRow(Data):
    """One input, output or state of a function."""

    direction: Literal["input", "output", "state"]
    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    """What the app gives, or does with it."""


class CallSignature(Data):
    """Functions that take and give the same tensors."""

    shards: tuple[str, ...]
    functions: tuple[str, ...]
    tokens: int
    tensors: tuple[TensorRow, ...]


class CallOrder(Data):
    """What an app calls for one step of a mode."""

    mode: str
    tokens: int
    calls: tuple[str, ...]


class FileRow(Data):
    """A file of the bundle, or a folder that is one thing."""

    path: str
    bytes: int
    holds: str


class MemoryRow(Data):
    """Bytes that an app keeps."""

    name: str
    bytes: int
    note: str


class ForDevelopers(Data):
    """What somebody needs who builds an app on the bundle."""

    context: int
    """Tokens that the caches have room for."""
    deployment: str
    """The oldest system that loads it."""
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
    """What its gate asks, in the same unit; None where no gate asks anything."""
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
    schema_version: Literal[2] = 2
    title: str
    """The model's name."""
    date: str
    """When the bundle was judged, or written if it was not; a day, UTC."""
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
    quality: SweepQuality | Absent
    speculation: DraftBench | Absent
    predicted: CallTimes | Absent
    provenance: tuple[Fact, ...]
