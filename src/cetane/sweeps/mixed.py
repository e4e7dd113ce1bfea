"""Mixed compressions: the harm of each format to each layer is measured, then a mix is chosen.

A measurement compresses one group of weights, and leaves the rest in fp16. The harm is the KL to
the fp16 weights. The mix has the formats with the least sum of harms for a size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from cetane.compress import Format, Selection, parse_format, pattern
from cetane.compress.allocate import Option, allocate
from cetane.families import Weight
from cetane.files import Progress
from cetane.planner import Planner
from cetane.sweeps.grid import Candidate, load_grid


@dataclass(frozen=True)
class Group:
    """One layer's weights of a kind, and patterns that match only their names."""

    layer: int
    kind: str
    weights: tuple[Weight, ...]
    patterns: tuple[str, ...]

    def formats(self) -> Iterator[Format]:
        """The formats of the grid's `mixed` table that fit all weights."""
        for name in load_grid().mixed.formats:
            form = parse_format(name)
            if all(form.fits(weight.shape) for weight in self.weights):
                yield form

    def nbytes(self, form: Format) -> int:
        return sum(form.nbytes(weight.shape) for weight in self.weights)


def groups_of(planner: Planner) -> list[Group]:
    """The groups of a model that some format of the grid fits."""
    blocks = chain.from_iterable(planner.members.values())
    kinds = sorted(
        ((b.layer, w.kind, w) for b in blocks for _, w in b.weights() if w.kind),
        key=lambda item: item[:2],
    )
    names = {weight.name for _, _, weight in kinds}
    made = []
    for (layer, kind), items in groupby(kinds, key=lambda item: item[:2]):
        weights = tuple(weight for _, _, weight in items)
        mine = {weight.name for weight in weights}
        group = Group(layer, str(kind), weights, tuple(pattern(mine, names - mine)))
        if any(True for _ in group.formats()):
            made.append(group)
    return made


def harms(
    groups: Sequence[Group],
    harm: Callable[[Group, Format, Selection], float],
    base: Selection,
    progress: Progress,
) -> list[list[Option]]:
    """Every group's formats, each with its harm while all else is in fp16.

    `base` names the sensitivities and the basis, and no format.
    """
    wanted = [(g, *single) for g in groups for single in singles(g, base)]
    options: dict[Group, list[Option]] = {group: [] for group in groups}
    for done, (group, form, selection) in enumerate(wanted):
        progress(f"layer {group.layer}, {group.kind}, {form.name}", done, len(wanted))
        cost = harm(group, form, selection)
        options[group].append(Option(form.name, group.nbytes(form), cost))
    progress("layers", len(wanted), len(wanted))
    return list(options.values())


def singles(group: Group, base: Selection) -> Iterator[tuple[Format, Selection]]:
    """The formats of one group, each with the selection that has all else in fp16."""
    for form in group.formats():
        yield form, base.model_copy(update={"names": dict.fromkeys(group.patterns, form.name)})


def mix(
    groups: Sequence[Group],
    options: Sequence[Sequence[Option]],
    budget: int,
    base: Selection,
) -> Candidate | None:
    """The formats of least harm for at most `budget` bytes of the groups; None if none fit."""
    chosen = allocate(options, budget)
    if chosen is None:
        return None
    names = {
        pattern: option.name
        for group, option in zip(groups, chosen, strict=True)
        for pattern in group.patterns
    }
    size = 8 * sum(option.nbytes for option in chosen)
    bits = size / sum(weight.elements for group in groups for weight in group.weights)
    selection = base.model_copy(update={"names": names})
    return Candidate(f"mixed-{bits:.2f}", "mixed", None, None, selection)
