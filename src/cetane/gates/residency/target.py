"""The machine that an audit is for."""

from dataclasses import dataclass

from cetane.hardware.chips import DEFAULT_CHIP, Quantity, find_chip

DEFAULT_OS = 26.0
"""Where most of the evidence was measured."""


@dataclass(frozen=True)
class Target:
    """A chip, and the number of its system: macOS and iOS count alike from 26 on; of earlier ones,
    the iOS number (iOS 18 is macOS 15)."""

    chip: str = DEFAULT_CHIP
    os: float = DEFAULT_OS

    def __post_init__(self) -> None:
        find_chip(self.chip)

    def limit(self, quantity: Quantity) -> int:
        """What the chip can take of something."""
        return int(find_chip(self.chip).figure(quantity).value)

    def __str__(self) -> str:
        return f"{self.chip}, OS {self.os:g}"
