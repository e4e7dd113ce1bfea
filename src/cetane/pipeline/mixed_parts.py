"""Weights that a mix of formats treats alike."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import numpy as np

from cetane.compress import Format, Palette, parse_format, patterns
from cetane.compress.allocate import Option, allocate
from cetane.compress.formats import WIDTHS
from cetane.families import Weight
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe
from cetane.schema.subset import as_ranges

THIRDS = 3
"""Parts of the layers, by depth, that a mix tells apart. With 30, one for each layer, SmolLM2's
best mix of 4.1 bits is predicted to cost 5 % less KL. But then every layer is another program."""
ERRORS = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 6: 0.000687}
"""By bits: the mean squared error of normal numbers of variance 1, rounded to the nearest of 2^bits
levels. The levels are those of least error (Max, 1960; 6 bits by Lloyd's own steps). Turned
channels are normal, and the errors of all others have nearly these ratios."""
VECTOR_ERRORS = {(1, 2): 0.3635, (1, 4): 0.3449, (2, 2): 0.1085, (2, 4): 0.0977, (3, 2): 0.0303,
                 (4, 2): 0.00787}  # fmt: skip
"""The same for palettes of vectors, by bits and by the weights of a vector. They are of k-means
palettes of 130,000 vectors, on 60,000 others."""
LARGE_GROUP = 32
"""Output channels that may share one of the largest palettes."""


@dataclass(frozen=True)
class MixedPart:
    """Weights that a mix treats alike: those of one part of the layers."""

    weights: tuple[Weight, ...]
    patterns: tuple[str, ...]
    """Glob patterns of the weights' names, which match no other weight."""

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

    def harm(self, harms: Mapping[str, float]) -> float:
        """The sum of its tensors' harms, by name. Some weights are rows of one tensor, as a fused
        projection's queries and keys: its harm counts once."""
        return sum(harms[name] for name in dict.fromkeys(weight.matrix for weight in self.weights))

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
        """The part of some weights, with patterns for each layer. `names` are those of all weights
        of the model: no pattern may match others."""
        mine = {weight.name for weight in weights}
        layers = groupby(sorted(mine), key=lambda name: name.split(".")[:3])
        by_layer = (patterns(list(part), set(names) - mine) for _, part in layers)
        return cls(tuple(weights), tuple(chain.from_iterable(by_layer)))


def described(parts: Sequence[MixedPart]) -> str:
    """Parts in words: "v_proj of layers 0 to 29, k_proj and up_proj of layers 10 to 29"."""
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
    """Its predicted KL, divided by that of the uniform palettes."""

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
        """A recipe of uniform palettes with this mix in their place. Nothing is fitted yet."""
        own = recipe.compression
        names = self.names(own.default) | own.names
        return override(recipe, {"compression.names": names, "compression.fitted": None})

    def described(self, default: str) -> str:
        """Its bits, and the parts of other bits than the default: "4.10 bits a weight (6 for
        v_proj)"."""
        of_bits: dict[int, list[MixedPart]] = defaultdict(list)
        for part, form in zip(self.parts, self.formats, strict=True):
            if form.name != default:
                of_bits[form.bits].append(part)
        said = [f"{bits} for {described(of_bits[bits])}" for bits in sorted(of_bits, reverse=True)]
        return f"{self.bits:.2f} bits a weight ({'; '.join(said)})"


def best_mix(
    parts: Sequence[MixedPart], harms: Mapping[str, float], uniform: Palette, most: float
) -> Mix | None:
    """The mix that is predicted to cost least KL, with at most `most` bits a weight.

    `harms` is the KL that each tensor costs in the `uniform` palettes, in nats by name. None if no
    mix costs less than these.
    """
    choices = [{form.name: form for form in widths(uniform) if part.takes(form)} for part in parts]
    options = []
    for part, own in zip(parts, choices, strict=True):
        harm = part.harm(harms) / error(uniform)
        options.append([Option(form.name, part.nbytes(form), harm * error(form))
                        for form in own.values()])  # fmt: skip
    chosen = allocate(options, int(most * sum(part.elements for part in parts) / 8))
    before = sum(part.harm(harms) for part in parts)
    if chosen is None or sum(option.harm for option in chosen) >= before:
        return None
    formats = (own[option.name] for own, option in zip(choices, chosen, strict=True))
    return Mix(tuple(parts), tuple(formats), sum(option.harm for option in chosen) / before)


def widths(uniform: Palette) -> Iterator[Palette]:
    """The palettes that a mix may have in place of a uniform one.

    None has fewer bits: such errors are too large to add up. In a mix of 3.1 bits for SmolLM2, 2
    bits for queries lost what 6 bits for values gained. Palettes of 64 entries may also serve 32
    channels. For these they take a quarter of the bytes that groups of 8 take, and lose hardly
    anything. With more bits, a vector holds as many weights as 8 bits can name.
    """
    if uniform.group is not None and uniform.group < LARGE_GROUP:
        yield replace(uniform, bits=max(ERRORS), group=LARGE_GROUP, vector=1)
    for bits in ERRORS:
        if bits >= uniform.bits:
            lengths = (v for v in (4, 2, 1) if v <= uniform.vector and v * bits <= max(WIDTHS))
            yield replace(uniform, bits=bits, vector=next(lengths))


def error(form: Palette) -> float:
    """What a palette leaves of normal numbers, as in `ERRORS`."""
    if form.vector == 1:
        return ERRORS[form.bits]
    return VECTOR_ERRORS[form.bits, form.vector]


def parts_of(planner: Planner, key: Callable[[Weight], str | None]) -> list[MixedPart]:
    """The compressed weights of a model in parts, by their `key` and the third of the layers in
    which they are. A weight whose key is None is in no part."""
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
