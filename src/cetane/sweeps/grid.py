"""The grid of a sweep: the formats in `data/sweep.toml`, for a model's weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from itertools import product

from cetane.compress import Format, Selection, SensitivityFile, parse_format
from cetane.compress.formats import Fp16, Linear, Palette
from cetane.errors import CetaneError
from cetane.families import Weight
from cetane.planner import Planner
from cetane.sweeps.points import Method
from cetane.validation import Data, nearest, parse_toml, validated


class GridAxes(Data):
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


class UsualFormats(Data):
    formats: tuple[str, ...]


class MixedFormats(Data):
    formats: tuple[str, ...]
    sizes: tuple[str, ...]


class Grid(Data):
    """`data/sweep.toml`."""

    grid: GridAxes
    usual: UsualFormats
    mixed: MixedFormats


@cache
def load_grid() -> Grid:
    """The grid that ships."""
    text = (resources.files("cetane") / "data" / "sweep.toml").read_text(encoding="utf-8")
    return validated(Grid, parse_toml(text, "sweep.toml"), "sweep.toml")


def chosen(patterns: Sequence[str]) -> list[str]:
    """The formats that match these patterns, fp16 first; without patterns the usual formats.

    A full name also chooses a format outside the grid. Raises CetaneError for a pattern without a
    match.
    """
    grid = load_grid()
    known = list(grid.grid.formats())
    names: dict[str, None] = {"fp16": None}
    for pattern in patterns or grid.usual.formats:
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            try:
                matching = [parse_format(pattern).name]
            except CetaneError as error:
                raise CetaneError(
                    f"--formats {pattern}: no such format", f"{nearest(pattern, known)}, ..."
                ) from error
        names |= dict.fromkeys(matching)
    return list(names)


@dataclass(frozen=True)
class Candidate:
    """A compression to be judged."""

    name: str
    method: Method
    bits: int | None
    group: str | None
    selection: Selection


def candidate(form: Format, planner: Planner, sensitivities: SensitivityFile | None) -> Candidate:
    """One format for all weights of a plan, as a candidate.

    Weights stay in fp16 if the recipe keeps them so, or if the format cannot encode them.
    `sensitivities` are for a format that needs them.
    """
    method, group = described(form)
    rules = planner.recipe.compression
    kept: dict[str, dict[str, str]] = {
        table: {
            key: name
            for key, name in getattr(rules, table).items()
            if name == "fp16" and not isinstance(form, Fp16)
        }
        for table in ("types", "names")
    }
    kept["names"] |= {weight.name: "fp16" for weight in weights(planner) if not fits(form, weight)}
    selection = Selection(
        default=form.name,
        types=kept["types"],
        names=kept["names"],
        sensitivity=sensitivities if form.weighted else None,
    )
    return Candidate(form.name, method, form.bits, group, selection)


def described(form: Format) -> tuple[Method, str | None]:
    """The method of a format, and the group of weights that share a scale or a palette."""
    match form:
        case Linear(per=per):
            return "linear", f"block{per}" if isinstance(per, int) else per
        case Palette(mode=mode, group=group):
            return mode, "tensor" if group is None else str(group)
    return "fp16", None


def fits(form: Format, weight: Weight) -> bool:
    """Whether a format can encode a weight."""
    try:
        form.check(weight.shape, weight.name)
    except CetaneError:
        return False
    return True


def weights(planner: Planner) -> Iterator[Weight]:
    """The weights of a plan that formats are for."""
    for blocks in planner.members.values():
        for block in blocks:
            yield from (weight for _, weight in block.weights() if weight.kind)
