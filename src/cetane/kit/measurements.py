"""`measurements.json`: what a kit's script recorded, read as the file of a stranger.

Every field is known, bounded and finite. A file that was changed by hand, and figures that no
machine gives, are refused by name.
"""

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, StringConstraints, model_validator

from cetane.errors import CetaneError, printable
from cetane.files import read_bytes
from cetane.gates.residency.measured import MeasuredOp
from cetane.measuring.energy import MOST_WATTS, with_processor
from cetane.measuring.record import SCHEMA, seal
from cetane.validation import Data, Sha256, parse_json, validated

LARGEST = 1 << 28
"""Bytes of the largest file that is read."""
HINT = "measure.py of a kit writes it; cetane kit BUNDLE makes a kit"
DAY_MS = 8.64e7
"""Milliseconds of a day: no measured time is longer."""


OUTLIERS = 100
"""The largest mean of times, as a multiple of their 95th percentile."""


def one_line(text: str) -> str:
    """`text` as one line that is safe for any terminal."""
    return printable(text, None)


def iso_time(text: str) -> str:
    """A time in ISO 8601. Raises ValueError for any other text."""
    datetime.fromisoformat(text)
    return text


Ms = Annotated[float, Field(strict=True, gt=0, le=DAY_MS, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(strict=True, ge=0, le=2**48)]
Text = Annotated[str, StringConstraints(max_length=1000), AfterValidator(one_line)]
Time = Annotated[str, StringConstraints(max_length=50), AfterValidator(iso_time)]
Label = Literal["A", "B"]
"""The name of a bundle in its kit."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Token = Annotated[int, Field(strict=True, ge=0, lt=2**24)]
Bounded = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-1e9, le=1e9)]


class Machine(Data):
    """The machine that measured."""

    mac: StrictBool
    chip: Text
    model: Text
    virtual: StrictBool
    memory_bytes: Count
    system: Text
    build: Text
    python: Text
    coremltools: Text
    numpy: Text
    power: Text
    thermal: Text
    load: Annotated[float, Field(strict=True, ge=0, le=1e5)]

    @property
    def device(self) -> bool:
        """Whether it has a Neural Engine: a Mac of Apple silicon, and not a virtual one."""
        return self.mac and self.chip.startswith("Apple ") and not self.virtual

    def __str__(self) -> str:
        return f"{self.chip}, {self.system} ({self.build})"


class MeasuringOptions(Data):
    """The options with which the script measured."""

    compute_units: Literal["CPU_AND_NE", "ALL", "CPU_ONLY", "CPU_AND_GPU"]
    rounds: Annotated[int, Field(strict=True, ge=0, le=10_000)]
    steps: Annotated[int, Field(strict=True, ge=0, le=1_000_000)]


class Spread(Data):
    """The times of several calls."""

    median_ms: Ms
    p95_ms: Ms
    min_ms: Ms
    count: Annotated[int, Field(strict=True, ge=1, le=10_000_000)]

    @model_validator(mode="after")
    def ordered(self) -> "Spread":
        if not self.min_ms <= self.median_ms * 1.0001 or not self.median_ms <= self.p95_ms * 1.0001:
            raise ValueError("the least, the median and the 95th percentile are not in order")
        return self


class Predictions(Spread):
    """The predictions of one function."""

    first_ms: Ms
    finite: StrictBool
    errors: dict[Name, Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None]
    """Relative errors of outputs; None if one is not finite."""


class RecordedFunction(Data):
    """One function. Figures that a fault cut off are None."""

    shard: Name
    function: Name
    tokens: Annotated[int, Field(strict=True, ge=1, le=2**20)]
    compile_ms: Ms | None = None
    load_ms: Ms | None = None
    load_again_ms: Ms | None = None
    predict: Predictions | None = None
    plan: Annotated[tuple[MeasuredOp, ...], Field(max_length=1_000_000)] | None = None
    peak_bytes: Count | None = None
    refusals: Annotated[tuple[Text, ...], Field(max_length=20)] = ()


class ProbePosition(Data):
    """The logits of one position, against the expected ones."""

    expected: Token
    margin: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
    finite: StrictBool
    top: Annotated[tuple[tuple[Token, Bounded], ...], Field(max_length=5)] = ()
    cosine: Annotated[float, Field(strict=True, ge=-1.0001, le=1.0001)] = 0.0
    kl: Annotated[float, Field(strict=True, ge=-1e-4, le=1e6)] = 1e6
    largest_error: Annotated[float, Field(strict=True, ge=0, le=1e9)] = 1e9

    @model_validator(mode="after")
    def ranked(self) -> "ProbePosition":
        logits = [logit for _, logit in self.top]
        if self.finite and (not logits or logits != sorted(logits, reverse=True)):
            raise ValueError("the best tokens are not in order")
        return self


class OpenedChain(Data):
    """The bundle, opened whole, and a first turn of one step."""

    open_ms: Ms
    load_ms: dict[Name, Ms]
    peak_bytes: Count


class RecordedBundle(Data):
    """One bundle of the kit."""

    name: Text
    digest: Sha256
    functions: dict[Name, RecordedFunction]
    probes: dict[Name, Annotated[tuple[ProbePosition, ...], Field(max_length=100_000)]] = Field(
        default_factory=dict
    )
    chain: OpenedChain | None = None
    refusals: Annotated[tuple[Text, ...], Field(max_length=20)] = ()


class MeasuredTurn(Data):
    """One turn of a bundle: a prompt, then greedy decoding."""

    bundle: Label
    turn: Annotated[int, Field(strict=True, ge=1)]
    prompt_tokens: Annotated[int, Field(strict=True, ge=1)]
    first_token_ms: Ms
    prefill_tok_s: Annotated[float, Field(strict=True, gt=0, le=1e9)]
    decode: Spread
    decode_tok_s: Annotated[float, Field(strict=True, gt=0, le=1e7)]
    shard_ms: dict[Name, Annotated[float, Field(strict=True, ge=0, le=DAY_MS)]]
    tokens: Annotated[tuple[Token, ...], Field(max_length=1_000_001)]
    verify_tokens: Annotated[int, Field(strict=True, ge=1, le=2**20)] | None = None
    verify: Spread | None = None
    peak_bytes: Count

    @model_validator(mode="after")
    def consistent(self) -> "MeasuredTurn":
        if self.decode_tok_s * self.decode.min_ms > 1001:
            raise ValueError("more tokens a second than the fastest step allows")
        step = 1e3 / self.decode_tok_s
        if not self.decode.median_ms / 2.1 <= step <= OUTLIERS * self.decode.p95_ms:
            raise ValueError("the tokens a second are not those of the steps' times")
        if sum(self.shard_ms.values()) > 1.01 * step + 0.1:
            raise ValueError("the shards take longer than the steps that call them")
        rate = 1e3 * self.prompt_tokens / self.first_token_ms
        if abs(rate / self.prefill_tok_s - 1) > 0.01:
            raise ValueError("the rate of prefill is not its tokens over its time")
        if (self.verify is None) != (self.verify_tokens is None):
            raise ValueError("a verifying call needs its tokens and its times")
        return self


class Energy(Data):
    """The energy of decoding for a while."""

    bundle: Label
    meter: Text
    begun: Annotated[float, Field(strict=True, ge=0, le=1e11)]
    ended: Annotated[float, Field(strict=True, ge=0, le=1e11)]
    tokens: Annotated[int, Field(strict=True, ge=1)]
    samples: Annotated[int, Field(strict=True, ge=1)]
    watts: dict[Name, Annotated[float, Field(strict=True, ge=0, le=MOST_WATTS)]]
    joules_per_token: dict[Name, Annotated[float, Field(strict=True, ge=0, le=1e6)]]
    ane_silent: StrictBool
    caveats: tuple[Text, ...]

    @model_validator(mode="after")
    def consistent(self) -> "Energy":
        share = (self.ended - self.begun) / self.tokens
        for rail, watts in with_processor(self.watts).items():
            if abs(self.joules_per_token.get(rail, -1) - watts * share) > 1e-6 * max(1, watts):
                raise ValueError(f"the joules of {rail} are not its watts times the time")
        return self


class MeasuredJob(Data):
    """The state of a job, and how often it was begun."""

    state: Literal["running", "begun", "done", "fault"]
    tries: Annotated[int, Field(strict=True, ge=1, le=100)]


class Fault(Data):
    """What went wrong in a job."""

    job: Text
    phase: Text
    kind: Literal["time limit", "died", "error", "not finite", "interrupted", "disk full"]
    detail: Text
    at: Text

    def __str__(self) -> str:
        return f"{self.job}: {self.kind} {self.phase}: {self.detail}".replace(" :", ":")


class Measurements(Data):
    """The whole file."""

    schema_version: Literal[1]
    kit: Sha256
    machine: Machine
    options: MeasuringOptions
    begun: Time
    written: Time
    finished: StrictBool
    bundles: Annotated[dict[Label, RecordedBundle], Field(min_length=1)]
    turns: Annotated[tuple[MeasuredTurn, ...], Field(max_length=20_000)]
    energy: Annotated[tuple[Energy, ...], Field(max_length=1000)]
    jobs: dict[Name, MeasuredJob]
    faults: Annotated[tuple[Fault, ...], Field(max_length=100_000)]
    seal: Sha256

    @model_validator(mode="after")
    def of_bundles(self) -> "Measurements":
        for label in [*(one.bundle for one in self.turns), *(one.bundle for one in self.energy)]:
            if label not in self.bundles:
                raise ValueError(f"it has figures of {label}, and no such bundle")
        return self

    @property
    def date(self) -> str:
        return datetime.fromisoformat(self.begun).date().isoformat()

    def label(self, digest: str) -> Label:
        """The label of the bundle with this digest. Raises CetaneError if the record has
        none."""
        for label, bundle in self.bundles.items():
            if bundle.digest == digest:
                return label
        names = ", ".join(f"{b.name} ({b.digest[:12]})" for b in self.bundles.values())
        raise CetaneError(
            f"these are measurements of another bundle: {names}, not of {digest[:12]}",
            "measure this bundle: cetane kit BUNDLE",
        )


def read_measurements(path: Path) -> Measurements:
    """The file of a kit's script.

    Raises CetaneError for another file, for one that was changed after it was written, and for
    figures that contradict each other.
    """
    content: Any = parse_json(read_bytes(path, LARGEST), str(path), HINT, unique=True)
    if not isinstance(content, dict) or "kit" not in content:
        raise CetaneError(f"{path}: not the measurements of a kit", HINT)
    if content.get("schema_version") != SCHEMA:
        raise CetaneError(f"{path}: schema {content.get('schema_version')}, not {SCHEMA}", HINT)
    made = validated(Measurements, content, str(path), HINT)
    if seal(content) != made.seal:
        raise CetaneError(
            f"{path} was changed after it was written: its seal does not fit",
            "import the file that measure.py wrote",
        )
    return made
