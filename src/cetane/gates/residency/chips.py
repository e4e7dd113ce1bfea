"""The machine that an audit is for."""

from dataclasses import dataclass

from cetane.errors import CetaneError
from cetane.gates.residency.rule import read_toml

DEFAULT_CHIP, DEFAULT_OS = "m4-max", 26.0
"""Where most of the evidence was measured."""


@dataclass(frozen=True)
class Target:
    """A chip, and the number of its system: macOS and iOS count alike from 26 on; of earlier ones,
    the iOS number (iOS 18 is macOS 15)."""

    chip: str = DEFAULT_CHIP
    os: float = DEFAULT_OS

    def __post_init__(self) -> None:
        known = chips()
        if self.chip not in known:
            raise CetaneError(f"unknown chip {self.chip!r}; known: {', '.join(known)}")

    @property
    def longest_axis(self) -> int:
        return chips()[self.chip]

    def __str__(self) -> str:
        return f"{self.chip}, OS {self.os:g}"


def chips() -> dict[str, int]:
    """The longest axis of every chip."""
    content = read_toml("chips.toml")
    return {
        chip: content["limits"][limit] for limit in content["limits"]
        for chip in content["chips"][limit]
    }  # fmt: skip
