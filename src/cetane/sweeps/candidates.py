"""Candidates of a sweep: compressions to be judged, each the selection that a recipe would have."""

from collections.abc import Iterator
from dataclasses import dataclass

from cetane.compress import Format, Selection, SensitivityFile, parse_format
from cetane.compress.formats import Fp16, Linear, Palette
from cetane.families import Weight
from cetane.planner import Planner, can_rotate
from cetane.sweeps.grid import Way
from cetane.sweeps.points import PointMethod
from cetane.validation import validated


@dataclass(frozen=True)
class Candidate:
    """A compression to be judged."""

    name: str
    method: PointMethod
    bits: int | None
    group: str | None
    selection: Selection


def candidate_of(way: Way, planner: Planner, sensitivities: SensitivityFile | None) -> Candidate:
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
