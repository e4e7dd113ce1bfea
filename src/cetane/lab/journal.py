"""The journal: one JSON object a line, appended and synced; what was tried, and what came of it.

A run's intent is on disk before the run starts, its outcome after it ends, however it ends. A power
loss can cut the last line off: that line is set aside in `journal.jsonl.broken` and everything
before it stays. A broken line elsewhere is nobody's power loss, and an error.
"""

import datetime
import fcntl
import io
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import Field, TypeAdapter, ValidationError

from cetane.errors import CetaneError
from cetane.lab.experiment import ArmName, Status
from cetane.validation import Data

PACKAGES = ("cetane", "torch", "coremltools", "transformers", "onnxruntime", "numpy")
Ended = Literal["passed", "failed", "error", "interrupted"]


class Figure(Data):
    """A metric of an arm. `low` and `high` are quartiles of what was measured `n` times, or the
    interval of a prediction."""

    value: float | None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    kind: Literal["measured", "predicted"] = "measured"
    n: int = 1
    note: str = ""


class ArmOutcome(Data):
    """What one side came to."""

    artefact: str | None = None
    """Digest of the bundle."""
    recipe: str = ""
    """sha256 of the recipe."""
    metrics: dict[str, Figure] = Field(default_factory=dict)
    texts: dict[str, str] = Field(default_factory=dict)
    curves: dict[str, tuple[tuple[float, float], ...]] = Field(default_factory=dict)


class GateOutcome(Data):
    """A gate, and the value that it saw; None if there was none, which fails."""

    metric: str
    arm: Literal["candidate", "baseline", "ratio"]
    least: float | None = None
    most: float | None = None
    value: float | None
    passed: bool


class Intent(Data):
    """A run is about to start."""

    event: Literal["intent"] = "intent"
    run: str
    experiment: str
    at: str
    experiment_sha256: str
    command: str
    recipes: dict[ArmName, str]
    machine: dict[str, str | int]
    versions: dict[str, str]


class Outcome(Data):
    """A run has ended."""

    event: Literal["outcome"] = "outcome"
    run: str
    experiment: str
    at: str
    status: Ended
    seconds: float
    arms: dict[ArmName, ArmOutcome] = Field(default_factory=dict)
    gates: tuple[GateOutcome, ...] = ()
    surprise: str = ""
    lesson: str = ""
    next: str = ""
    error: str = ""


class Verdict(Data):
    """Somebody has decided."""

    event: Literal["verdict"] = "verdict"
    experiment: str
    at: str
    status: Status
    reason: str
    obituary: str = ""


Event = Annotated[Intent | Outcome | Verdict, Field(discriminator="event")]
EVENT: TypeAdapter[Intent | Outcome | Verdict] = TypeAdapter(Event)


@dataclass(frozen=True)
class Run:
    """An intent, and its outcome: None while it runs, and for ever if it was killed."""

    intent: Intent
    outcome: Outcome | None

    @property
    def status(self) -> Ended:
        return "interrupted" if self.outcome is None else self.outcome.status


class Journal:
    """A journal file, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.broken = path.with_name(path.name + ".broken")

    def events(self) -> list[Intent | Outcome | Verdict]:
        """All events in order, without a broken last line; CetaneError for one in the middle."""
        return self._parse(self.path.read_bytes())[0] if self.path.exists() else []

    def append(self, event: Intent | Outcome | Verdict) -> None:
        """Add one line, and return when it is on the disk."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as file:
            self._mend(file)
            file.write(event.model_dump_json().encode() + b"\n")
            sync(file)

    def repair(self) -> int:
        """Set a broken last line aside; returns how many bytes, 0 if nothing is broken."""
        if not self.path.exists():
            return 0
        with self._locked() as file:
            return self._mend(file)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The file for appending, while no other process does."""
        new = not self.path.exists()
        with self.path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if new:
                sync_folder(self.path.parent)
            yield file

    def _mend(self, file: BinaryIO) -> int:
        file.seek(0)
        content = file.read()
        kept = self._parse(content)[1]
        lost = content[kept:]
        if lost:
            with self.broken.open("ab") as aside:
                aside.write(lost + b"\n")
                sync(aside)
            file.truncate(kept)
            sync(file)
        elif content and not content.endswith(b"\n"):  # only the line's end was lost
            file.write(b"\n")
            sync(file)
        return len(lost)

    def _parse(self, content: bytes) -> tuple[list[Intent | Outcome | Verdict], int]:
        """The events, and how many bytes they take."""
        found: list[Intent | Outcome | Verdict] = []
        kept = 0
        lines = io.BytesIO(content).readlines()
        for number, line in enumerate(lines, 1):
            try:
                found.append(EVENT.validate_python(json.loads(line)))
            except ValueError as error:  # pydantic's are, and those of JSON and of UTF-8
                if number == len(lines) and not isinstance(error, ValidationError):
                    break
                raise CetaneError(
                    f"{self.path}: line {number} is broken: {reason(error)}",
                    "restore that line from a copy; only a last line is repaired by itself",
                ) from error
            kept += len(line)
        return found, kept

    def runs(self) -> dict[str, list[Run]]:
        """The runs of every experiment, in order."""
        events = self.events()
        outcomes = {event.run: event for event in events if isinstance(event, Outcome)}
        found: dict[str, list[Run]] = {}
        for event in events:
            if isinstance(event, Intent):
                run = Run(event, outcomes.get(event.run))
                found.setdefault(event.experiment, []).append(run)
        return found

    def verdicts(self) -> dict[str, Verdict]:
        """The last verdict on every experiment that has one."""
        return {event.experiment: event for event in self.events() if isinstance(event, Verdict)}


def reason(error: ValueError) -> str:
    """What is wrong with a line, in one."""
    return error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """A new file is there after a power loss only if its folder knows."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def now() -> str:
    """The time as the journal writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def machine() -> dict[str, str | int]:
    """What a measurement was taken on."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def processor() -> str:
    """The processor's name; Linux keeps it in a file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """Of what can change a figure."""
    return {"python": platform.python_version()} | {name: found(name) for name in PACKAGES}


def found(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def as_dict(event: Intent | Outcome | Verdict) -> dict[str, Any]:
    """An event as JSON has it."""
    return event.model_dump(mode="json")
