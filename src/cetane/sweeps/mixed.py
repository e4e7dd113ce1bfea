"""Mixed compressions: the harm of each format to each layer is measured, then a mix is chosen.

A measurement compresses one part of the weights, and leaves the rest in fp16. The harm is the KL to
the fp16 weights. The mix has the formats with the least sum of harms for a size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from cetane.compress import Format, Selection, parse_format, patterns
from cetane.compress.allocate import Option, allocate
from cetane.files import Progress
from cetane.pipeline.mixed_parts import MixedPart
from cetane.planner import Planner
from cetane.sweeps.candidates import Candidate
from cetane.sweeps.grid import load_grid


@dataclass(frozen=True)
class LayerPart(MixedPart):
    """One layer's weights of a kind."""

    layer: int
    weight_kind: str
    """`Weight.kind` of all of them."""

    @property
    def name(self) -> str:
        return f"layer {self.layer}, {self.weight_kind}"

    def formats(self) -> Iterator[Format]:
        """The formats of the grid's `mixed` table that fit all weights."""
        for name in load_grid().mixed.formats:
            form = parse_format(name)
            if self.takes(form):
                yield form


def parts_of(planner: Planner) -> list[LayerPart]:
    """The parts of a model that some format of the grid fits."""
    kinds = sorted(
        ((b.layer, w.kind, w) for b in planner.blocks for _, w in b.weights() if w.kind),
        key=lambda item: item[:2],
    )
    names = {weight.name for _, _, weight in kinds}
    made = []
    for (layer, kind), items in groupby(kinds, key=lambda item: item[:2]):
        weights = tuple(weight for _, _, weight in items)
        mine = {weight.name for weight in weights}
        part = LayerPart(weights, tuple(patterns(mine, names - mine)), layer, str(kind))
        if any(True for _ in part.formats()):
            made.append(part)
    return made


def harms(
    parts: Sequence[LayerPart],
    harm: Callable[[LayerPart, Format, Selection], float],
    base: Selection,
    progress: Progress,
) -> list[list[Option]]:
    """Every part's formats, each with its harm while all else is in fp16.

    `base` names the sensitivities and the basis, and no format.
    """
    wanted = [(p, *single) for p in parts for single in singles(p, base)]
    options: dict[LayerPart, list[Option]] = {part: [] for part in parts}
    for done, (part, form, selection) in enumerate(wanted):
        progress(f"{part.name}, {form.name}", done, len(wanted))
        cost = harm(part, form, selection)
        options[part].append(Option(form.name, part.nbytes(form), cost))
    progress("layers", len(wanted), len(wanted))
    return list(options.values())


def singles(part: LayerPart, base: Selection) -> Iterator[tuple[Format, Selection]]:
    """The formats of one part, each with the selection that has all else in fp16."""
    for form in part.formats():
        yield form, base.model_copy(update={"names": dict.fromkeys(part.patterns, form.name)})


def mix(
    parts: Sequence[LayerPart],
    options: Sequence[Sequence[Option]],
    budget: int,
    base: Selection,
) -> Candidate | None:
    """The formats of least harm for at most `budget` bytes of the parts; None if none fit."""
    chosen = allocate(options, budget)
    if chosen is None:
        return None
    names = {
        pattern: option.name
        for part, option in zip(parts, chosen, strict=True)
        for pattern in part.patterns
    }
    size = 8 * sum(option.nbytes for option in chosen)
    bits = size / sum(weight.elements for part in parts for weight in part.weights)
    selection = base.model_copy(update={"names": names})
    return Candidate(f"mixed-{bits:.2f}", "mixed", None, None, selection)
