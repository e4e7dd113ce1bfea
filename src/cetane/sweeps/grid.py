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

from cetane.compress import Format, Selection, SensitivityFile, parse_format
from cetane.compress.formats import Fp16, Linear, Palette
from cetane.errors import CetaneError
from cetane.families import Weight
from cetane.files import shipped_text
from cetane.planner import Planner, can_rotate
from cetane.sweeps.points import PointMethod
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


@dataclass(frozen=True)
class Candidate:
    """A compression to be judged."""

    name: str
    method: PointMethod
    bits: int | None
    group: str | None
    selection: Selection


def candidate(way: Way, planner: Planner, sensitivities: SensitivityFile | None) -> Candidate:
    """One way for all weights of a plan, as a candidate.

    Weights stay in fp16 if the recipe keeps them so, or if the format cannot encode them.
    `sensitivities` are for a format that needs them. A way that fits constants does what `cetane
    port --bits` does. It keeps what the recipe says of types, names and fitting. It turns channels
    first if those of the model can be turned.
    """
    form, rules, fits_model = way.form, planner.recipe.compression, way.method is not None
    kind, group = method_and_group(form)
    kept: dict[str, dict[str, str]] = {
        table: {
            key: name
            for key, name in getattr(rules, table).items()
            if (methods_fit(name) if fits_model else name == "fp16" and not isinstance(form, Fp16))
        }
        for table in ("types", "names")
    }
    kept["names"] |= {weight.name: "fp16" for weight in weights(planner)
                      if not form.fits(weight.shape)}  # fmt: skip
    turns = fits_model and can_rotate(planner.checkpoint, planner.recipe)
    fitting = {key: getattr(rules, key) for key in ("minutes", "text", "second_order")}
    content = {
        "default": form.name,
        **kept,
        "sensitivity": sensitivities if form.weighted else None,
        "method": way.method or "plain",
        **(fitting if fits_model else {}),
        "rotate": rules.rotate or turns,
    }
    selection = validated(Selection, content, way.name)
    return Candidate(way.name, way.method or kind, form.bits, group, selection)


def methods_fit(name: str) -> bool:
    """Whether fitting methods take a format. They take no palettes whose entries have a rule of
    their own: `uniform` and `weighted` ones."""
    form = parse_format(name)
    return not isinstance(form, Palette) or form.mode == "kmeans"


def method_and_group(form: Format) -> tuple[PointMethod, str | None]:
    """The method of a format, and the group of weights that share a scale or a palette."""
    match form:
        case Linear(per=per):
            return "linear", f"block{per}" if isinstance(per, int) else per
        case Palette(mode=mode, group=group, vector=vector):
            return mode if vector == 1 else "vector", "tensor" if group is None else str(group)
    return "fp16", None


def weights(planner: Planner) -> Iterator[Weight]:
    """The weights of a plan that formats are for."""
    for block in planner.blocks:
        yield from (weight for _, weight in block.weights() if weight.kind)
