"""Weights that a mix of formats treats alike."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np

from cetane.compress import Format, Palette, parse_format, pattern
from cetane.compress.allocate import Option, allocate
from cetane.families import Weight
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, override
from cetane.schema.subset import as_ranges

THIRDS = 3
"""Parts of the layers, by depth, that a mix tells apart. With 30, one a layer, SmolLM2's best mix
of 4.1 bits is predicted to cost 5 % less KL, but every layer is another program then."""
ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 6: 0.000687}
"""Mean squared errors of normal numbers of variance 1 that have the nearest of 2, 4, 8, 16 and 64
levels, placed for the least (Max, 1960; 64: by Lloyd's own steps). Channels that are turned are
normal, and all others' errors have nearly these ratios."""
LARGE = 32
"""Channels that share the largest palettes, where they can."""


@dataclass(frozen=True)
class MixedPart:
    """Weights that a mix treats alike: those of one part of the layers."""

    weights: tuple[Weight, ...]
    patterns: tuple[str, ...]
    """Their names and no others'."""

    @property
    def elements(self) -> int:
        return sum(weight.elements for weight in self.weights)

    def nbytes(self, form: Format) -> int:
        """Bytes of its weights in a format."""
        return sum(form.nbytes(weight.shape) for weight in self.weights)

    def takes(self, form: Format) -> bool:
        """Whether a format fits its weights."""
        return all(form.fits(weight.shape) for weight in self.weights)

    def saved(self, small: str, large: str) -> int:
        """Bytes that the smaller of a mix's formats saves."""
        return self.nbytes(parse_format(large)) - self.nbytes(parse_format(small))

    @property
    def kind(self) -> str:
        """The last word of its weights' module: "down_proj"."""
        return self.weights[0].name.split(".")[-2]

    @property
    def layers(self) -> set[int]:
        """The layers of its weights; empty for those of no layer."""
        return {int(word) for w in self.weights for word in w.name.split(".")[:-2]
                if word.isdigit()}  # fmt: skip

    @classmethod
    def of(cls, weights: Sequence[Weight], names: Collection[str]) -> "MixedPart":
        """Some weights of a model whose weights have `names`: a pattern a layer."""
        mine = {weight.name for weight in weights}
        layers = groupby(sorted(mine), key=lambda name: name.split(".")[:3])
        patterns = (pattern(list(part), set(names) - mine) for _, part in layers)
        return cls(tuple(weights), tuple(chain.from_iterable(patterns)))


def described(parts: Sequence[MixedPart]) -> str:
    """What parts hold: "v_proj of layers 0 to 29, k_proj and up_proj of layers 10 to 29"."""
    layers: dict[str, set[int]] = defaultdict(set)
    for part in parts:
        layers[part.kind] |= part.layers
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, own in layers.items():
        kinds[ranges(own)].append(kind)
    return ", ".join(f"{' and '.join(own)}{where}" for where, own in kinds.items())


def ranges(layers: Collection[int]) -> str:
    """Layers in words: " of layers 0 to 9 and 20 to 29"."""
    if not layers:
        return ""
    said = [part.replace("-", " to ") for part in as_ranges(np.array(sorted(layers))).split()]
    return f" of layer{'s' * (len(layers) > 1)} {' and '.join(said)}"


def named(parts: Sequence[MixedPart], form: str) -> dict[str, str]:
    """A format for some parts, by name."""
    return {name: form for part in parts for name in part.patterns}


@dataclass(frozen=True)
class Mix:
    """A palette for each of some parts."""

    parts: tuple[MixedPart, ...]
    formats: tuple[Palette, ...]
    harm: float
    """The part of the uniform palettes' KL that it is predicted to cost."""

    @property
    def bits(self) -> float:
        """Bits a weight, palettes counted."""
        size = sum(map(MixedPart.nbytes, self.parts, self.formats))
        return 8 * size / sum(part.elements for part in self.parts)

    def names(self, default: str) -> dict[str, str]:
        """The formats that are not the default, by name."""
        return {pattern: form.name for part, form in zip(self.parts, self.formats, strict=True)
                if form.name != default for pattern in part.patterns}  # fmt: skip

    def given(self, recipe: Recipe) -> Recipe:
        """A recipe of uniform palettes with this in their place, and nothing fitted yet."""
        own = recipe.compression
        names = self.names(own.default) | own.names
        return override(recipe, {"compression.names": names, "compression.fitted": None})

    def described(self, default: str) -> str:
        """Its bits, and what has others than the default: "4.10 bits a weight (6 for v_proj)"."""
        of_bits: dict[int, list[MixedPart]] = defaultdict(list)
        for part, form in zip(self.parts, self.formats, strict=True):
            if form.name != default:
                of_bits[form.bits].append(part)
        said = [f"{bits} for {described(of_bits[bits])}" for bits in sorted(of_bits, reverse=True)]
        return f"{self.bits:.2f} bits a weight ({'; '.join(said)})"


def best_mix(
    parts: Sequence[MixedPart], harms: Mapping[str, float], uniform: Palette, most: float
) -> Mix | None:
    """The palettes that are predicted to cost least KL, of at most so many bits a weight; None
    where that is no less than the uniform ones cost. `harms` are what the weights cost in these."""
    choices = [{form.name: form for form in widths(uniform) if part.takes(form)} for part in parts]
    groups = []
    for part, own in zip(parts, choices, strict=True):
        harm = sum(harms[weight.name] for weight in part.weights) / ERRORS[uniform.bits]
        groups.append([Option(form.name, part.nbytes(form), harm * ERRORS[form.bits])
                       for form in own.values()])  # fmt: skip
    chosen = allocate(groups, int(most * sum(part.elements for part in parts) / 8))
    before = sum(harms[weight.name] for part in parts for weight in part.weights)
    if chosen is None or sum(option.harm for option in chosen) >= before:
        return None
    formats = (own[option.name] for own, option in zip(choices, chosen, strict=True))
    return Mix(tuple(parts), tuple(formats), sum(option.harm for option in chosen) / before)


def widths(uniform: Palette) -> Iterator[Palette]:
    """The palettes that a mix may have in place of this one: none of fewer bits, whose errors are
    too large to add up. With 2 bits for queries SmolLM2 lost in 3.1 bits what 6 for values gained.

    Those of 64 entries are for 32 channels first: there they take a quarter of the bytes, and lose
    hardly anything.
    """
    if uniform.group is not None and uniform.group < LARGE:
        yield replace(uniform, bits=max(ERRORS), group=LARGE)
    for bits in ERRORS:
        if bits >= uniform.bits:
            yield replace(uniform, bits=bits)


def parts_of(planner: Planner, key: Callable[[Weight], str | None]) -> list[MixedPart]:
    """The compressed weights of a model in parts: those of one key and of one part of the layers.
    A weight whose key is None is in none."""
    found: dict[tuple[str, int], list[Weight]] = defaultdict(list)
    names: set[str] = set()
    layers = planner.model.layers[-1].layer + 1
    for block in planner.blocks:
        depth = min(block.layer, layers - 1) * THIRDS // layers
        for _, weight in block.weights():
            if weight.kind is None:
                continue
            names.add(weight.name)
            if (own := key(weight)) is not None:
                found[own, depth].append(weight)
    return [MixedPart.of(weights, names) for weights in found.values()]
