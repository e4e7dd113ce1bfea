"""The grid of a sweep: the ways in `data/sweep.toml` to make a model's weights smaller.

A way is a format, and the method that finds its constants: `palette4-kmeans-group8` encodes the
weight alone, `palette4-kmeans-group8+gptq` fits the same constants to the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from typing import Literal, get_args

from cetane.compress import Format, parse_format
from cetane.errors import CetaneError
from cetane.files import shipped_text
from cetane.validation import Data, nearest, parse_toml, validated

FittingMethod = Literal["gptq", "tuned"]
"""Values of `compression.method` that a sweep tries. In place of `weighted` it has formats of
weighted palettes."""
BY = "+"
"""Between a format and its method."""


class GridAxes(Data):
    """The parts of formats' names, of which all combinations are known."""

    palette_bits: tuple[int, ...]
    palette_modes: tuple[str, ...]
    palette_groups: tuple[str, ...]
    linear_bits: tuple[int, ...]
    linear_scales: tuple[str, ...]

    def formats(self) -> Iterator[str]:
        """The names of all formats of the grid, formats of 8 bits first."""
        for bits, scale in product(self.linear_bits, self.linear_scales):
            yield f"int{bits}-per-{scale}"
        for bits, mode, group in product(
            self.palette_bits, self.palette_modes, self.palette_groups
        ):
            yield f"palette{bits}-{mode}-{group}"


class FittedFormats(Data):
    """Formats, and the methods that fit their constants."""

    formats: tuple[str, ...]
    methods: tuple[FittingMethod, ...]

    def ways(self) -> Iterator[str]:
        """The names of all ways that fit constants to the model."""
        for form, method in product(self.formats, self.methods):
            yield f"{form}{BY}{method}"


class UsualFormats(Data):
    """Patterns of the ways that a sweep tries by default."""

    formats: tuple[str, ...]


class MixedFormats(Data):
    """The formats that a mix chooses from."""

    formats: tuple[str, ...]
    sizes: tuple[str, ...]
    """Formats whose sizes mixes shall have."""


class Grid(Data):
    """`data/sweep.toml`."""

    grid: GridAxes
    fitted: FittedFormats
    usual: UsualFormats
    mixed: MixedFormats


@cache
def load_grid() -> Grid:
    """The grid that ships."""
    text = shipped_text("data/sweep.toml")
    return validated(Grid, parse_toml(text, "sweep.toml"), "sweep.toml")


def ways_named(patterns: Sequence[str]) -> list[str]:
    """The ways that match these patterns, by name, fp16 first; without patterns the usual ones.

    A full name also chooses a way outside the grid. Raises CetaneError for a pattern without a
    match.
    """
    grid = load_grid()
    known = [*grid.grid.formats(), *grid.fitted.ways()]
    names: dict[str, None] = {"fp16": None}
    for pattern in patterns or grid.usual.formats:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            try:
                matching = [parse_way(pattern).name]
            except CetaneError as error:
                raise CetaneError(
                    f"--formats {pattern}: no such format", f"{nearest(pattern, known)}, ..."
                ) from error
        names |= dict.fromkeys(matching)
    return list(names)


@dataclass(frozen=True)
class Way:
    """A format, and the method that fits its constants to the model; None encodes weights alone."""

    form: Format
    method: FittingMethod | None

    @property
    def name(self) -> str:
        return self.form.name if self.method is None else f"{self.form.name}{BY}{self.method}"


def parse_way(name: str) -> Way:
    """The way of this name. CetaneError for an unknown format or method."""
    form, by, method = name.partition(BY)
    if not by:
        return Way(parse_format(form), None)
    for known in get_args(FittingMethod):
        if method == known:
            return Way(parse_format(form), known)
    raise CetaneError(
        f"{name}: no method {method!r}", f"known: {', '.join(get_args(FittingMethod))}"
    )
