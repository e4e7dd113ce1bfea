"""What a bundle's gates keep of a device's measurements."""

from typing import Annotated

from pydantic import Field

from cetane.gates.residency.refuted import Refuted
from cetane.gates.verdict import Check
from cetane.kit.speed import Figures, SpeedCompared
from cetane.validation import Data

DEVICE, ENERGY = "device", "energy"
"""The names of the gates' files."""
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DeviceResult(Data):
    """One bundle's part of a kit's record, judged."""

    name: str
    passed: bool
    """Whether the machine computed what was expected."""
    machine: str
    device: bool
    """Whether that machine has a Neural Engine. A bundle keeps a result only then, and only if it
    ran on CPU_AND_NE."""
    date: str
    compute_units: str
    chip: str | None
    """The id of its chip; None if cetane does not know it."""
    checks: tuple[Check, ...]
    ties: int
    """Probed positions whose two best tokens are too near to be judged."""
    positions: int
    figures: Figures
    compared: tuple[SpeedCompared, ...]
    rules: tuple[Refuted, ...]
    """Rules of the audit that the measurements contradict."""
    measured_ops: int
    """The number of ops whose device the machine told."""
    faults: tuple[str, ...]
    refusals: tuple[str, ...]
    """Lines in which Apple's compilers refused something."""
    rows: int
    """Rows of evidence for the cost model."""
    caveats: tuple[str, ...]
    notes: tuple[str, ...]


class EnergyResult(Data):
    """A power meter's file, read as one load."""

    file: str
    samples: int
    seconds: float
    watts: dict[str, NotNegative]
    joules_per_token: dict[str, NotNegative] | None
    """Joules by rail; None without a number of tokens."""
    ane_silent: bool
    """Whether the meter gave 0 W, or nothing, for the Neural Engine."""
    caveats: tuple[str, ...]
    notes: tuple[str, ...] = Field(default=(), exclude_if=lambda notes: not notes)
