"""The target of an audit: a chip and its system."""

import re
from dataclasses import dataclass

from cetane.hardware.chips import DEFAULT_CHIP, Quantity, chip_named, find_chip

DEFAULT_OS = 26.0
"""The system on which most of the evidence was measured."""
OLDEST = {"CoreML5": 15, "CoreML6": 16, "CoreML7": 17, "CoreML8": 18, "CoreML9": 26}
"""The number of the oldest system that loads programs of an opset, as in `Target.os` (coremltools
9.0, `_OPSET`)."""
AHEAD = {"macOS": 3, "iOS": 0, "iPadOS": 0}
"""By how much iOS's number was ahead of each system's, before 26."""


@dataclass(frozen=True)
class Target:
    """A chip, and the number of its system. Raises CetaneError for an unknown chip.

    From 26 on, macOS and iOS have the same numbers. Earlier systems have the iOS number: macOS 15
    is 18.
    """

    chip: str = DEFAULT_CHIP
    os: float = DEFAULT_OS
    machine: str | None = None
    """A measured machine and its system, in their own words; None for a prediction."""

    def __post_init__(self) -> None:
        find_chip(self.chip)

    def limit(self, quantity: Quantity) -> int:
        """The chip's limit of a quantity."""
        return int(find_chip(self.chip).figure(quantity).value)

    def __str__(self) -> str:
        return self.machine or f"{self.chip}, OS {self.os:g}"


def system_number(system: str) -> float | None:
    """The number of a system, as in `Target.os`, by its own words: 18 for "macOS 15.5". None for
    words that name no system."""
    named = re.match(r"(\w+) (\d{1,3})\b", system)
    if named is None or named[1] not in AHEAD:
        return None
    number = int(named[2])
    return float(number if number >= DEFAULT_OS else number + AHEAD[named[1]])


def target_of(machine: str, system: str) -> Target:
    """The target whose rules hold for a machine, by its own words: "Apple M4 Max", "macOS 15.5".

    These are the rules of the default chip for an unknown one, and so for the system.
    """
    chip, os = chip_named(machine), system_number(system)
    return Target(DEFAULT_CHIP if chip is None else chip.id, DEFAULT_OS if os is None else os)


def opset_of(deployment: str) -> str:
    """The opset of programs for a deployment target, as "iOS18" in a recipe."""
    (opset,) = [o for o, system in OLDEST.items() if deployment == f"iOS{system}"]
    return opset


def oldest_system(deployment: str) -> int:
    """The number of the oldest system that loads programs for a deployment target."""
    return OLDEST[opset_of(deployment)]
