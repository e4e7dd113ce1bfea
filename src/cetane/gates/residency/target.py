"""The target of an audit: a chip and its system."""

from dataclasses import dataclass

from cetane.hardware.chips import DEFAULT_CHIP, Quantity, find_chip

DEFAULT_OS = 26.0
"""The system on which most of the evidence was measured."""
OLDEST = {"CoreML5": 15, "CoreML6": 16, "CoreML7": 17, "CoreML8": 18, "CoreML9": 26}
"""The number of the oldest system that loads programs of an opset, as in `Target.os` (coremltools
9.0, `_OPSET`)."""


@dataclass(frozen=True)
class Target:
    """A chip, and the number of its system. Raises CetaneError for an unknown chip.

    From 26 on, macOS and iOS have the same numbers. Earlier systems have the iOS number: macOS 15
    is 18.
    """

    chip: str = DEFAULT_CHIP
    os: float = DEFAULT_OS

    def __post_init__(self) -> None:
        find_chip(self.chip)

    def limit(self, quantity: Quantity) -> int:
        """The chip's limit of a quantity."""
        return int(find_chip(self.chip).figure(quantity).value)

    def __str__(self) -> str:
        return f"{self.chip}, OS {self.os:g}"


def opset_of(deployment: str) -> str:
    """The opset of programs for a deployment target, as "iOS18" in a recipe."""
    (opset,) = [o for o, system in OLDEST.items() if deployment == f"iOS{system}"]
    return opset
