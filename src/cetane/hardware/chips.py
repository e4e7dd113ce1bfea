"""Chip profiles: `data/chips.toml`, every figure with its source."""

import re
from functools import cache
from typing import Literal

from pydantic import Field

from cetane.errors import CetaneError
from cetane.files import shipped_text
from cetane.validation import Data, guess, parse_toml, validated

Quantity = Literal[
    "stream", "compute", "dispatch", "program_bytes", "programs", "states", "axis", "notch"
]
DEFAULT_CHIP = "m4-max"
"""The chip on which most of the evidence was measured."""


class ChipFigure(Data):
    """One published or measured value, in its quantity's unit, which `data/chips.toml` gives."""

    value: float = Field(gt=0, allow_inf_nan=False)
    source: str = Field(min_length=1)
    date: str = Field(min_length=4)
    """The date of the measurement or publication; if unknown, the date of reading."""
    of: str = ""
    """The chip that it belongs to, if another chip borrows it."""


class Chip(Data):
    """A chip. Figures that it lacks come from `fallback`."""

    id: str
    name: str
    fallback: str | None = None
    devices: tuple[str, ...] = ()
    """Its names in the evidence. Without a name, no rate was fitted to it."""
    sold_in: tuple[str, ...] = ()
    """Products whose names do not hold the chip's."""
    stream: tuple[ChipFigure, ...] = ()
    compute: tuple[ChipFigure, ...] = ()
    dispatch: tuple[ChipFigure, ...] = ()
    program_bytes: tuple[ChipFigure, ...] = ()
    programs: tuple[ChipFigure, ...] = ()
    states: tuple[ChipFigure, ...] = ()
    axis: tuple[ChipFigure, ...] = ()
    notch: tuple[ChipFigure, ...] = ()
    memory: tuple[ChipFigure, ...] = ()
    """GiB of the iPhone with the most. No chip borrows it."""

    @property
    def most_memory(self) -> int | None:
        """Bytes of memory of the iPhone with the most; None if that is unknown."""
        return round(self.memory[0].value * (1 << 30)) if self.memory else None

    @property
    def no_speed(self) -> str:
        """Why a chip without a weight stream gets no speed."""
        return f"no rate at which {self.name} reads weights was measured or published"

    def figure(self, quantity: Quantity) -> ChipFigure:
        """The figure to use: the chip's own first one, else the fallback's, marked in `of`."""
        own: tuple[ChipFigure, ...] = getattr(self, quantity)
        if own:
            return own[0]
        if self.fallback is None:
            raise CetaneError(f"chips.toml: {self.id} has neither a {quantity} nor a fallback")
        borrowed = load_chips()[self.fallback].figure(quantity)
        return borrowed.model_copy(update={"of": borrowed.of or self.fallback})


@cache
def load_chips() -> dict[str, Chip]:
    """All chips, by id."""
    return parse_chips(shipped_text("data/chips.toml"))


def parse_chips(text: str) -> dict[str, Chip]:
    """The chips of a TOML text. A CetaneError names the error in it."""
    content = parse_toml(text, "chips.toml")
    chips = {}
    for name, body in content.items():
        table = body | {"id": name} if isinstance(body, dict) else body
        chips[name] = validated(Chip, table, f"chips.toml: {name}")
    for name in chips:
        seen = [name]
        while (following := chips[seen[-1]].fallback) is not None:
            if following not in chips or following in seen:
                raise CetaneError(f"chips.toml: {name}: fallback {following!r} is not another chip")
            seen.append(following)
    return chips


def find_chip(name: str) -> Chip:
    """A chip by its id. Raises CetaneError with the known ids, or with that of a product's chip."""
    chips = load_chips()
    if name in chips:
        return chips[name]
    written = re.fullmatch(r"([am]\d+)[a-z-]*", name)
    # An A12 is no A19: a guess keeps the generation.
    near = guess(name, [id for id in chips if not written or id.split("-")[0] == written[1]])
    if not near and not written and (inside := chip_inside(name)):
        raise CetaneError(f"no chip {name!r}", f"for {inside.name}, write {inside.id}")
    raise CetaneError(f"no chip {name!r}; {near}known: {', '.join(chips)}")


def chip_inside(product: str) -> Chip | None:
    """The chip of a product, such as "iPhone 15 Pro" or "MacBook Air M2"; None if it is unknown."""
    words = in_words(product)
    chips = load_chips().values()
    sold = [chip for chip in chips if words in map(in_words, chip.sold_in)]
    named = [chip for chip in chips if in_words(chip.name) in words]
    return max(sold or named, key=lambda chip: len(chip.name), default=None)


def in_words(name: str) -> str:
    """The words and the numbers of a name, in lower case, each between spaces."""
    return f" {' '.join(re.findall('[a-z]+|[0-9]+', name.lower()))} "


def chip_of(device: str) -> Chip | None:
    """The chip of a device in the evidence; None if it is unknown."""
    return next((chip for chip in load_chips().values() if device in chip.devices), None)


def chip_named(brand: str) -> Chip | None:
    """The chip that a Mac names, such as "Apple M4 Max"; None if it is unknown."""
    name = brand.removeprefix("Apple ").strip()
    return next((chip for chip in load_chips().values() if chip.name == name), None)
