"""Weights that a mix of formats treats alike."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from cetane.compress import parse_format, pattern
from cetane.families import Weight
from cetane.planner import Planner
from cetane.schema.subset import as_ranges

THIRDS = 3
"""Parts of the layers, by depth, that a mix tells apart."""


@dataclass(frozen=True)
class MixedPart:
    """Weights that a mix treats alike: those of one part of the layers."""

    weights: tuple[Weight, ...]
    patterns: tuple[str, ...]
    """Their names and no others'."""

    def saved(self, small: str, large: str) -> int:
        """Bytes that the smaller of a mix's formats saves."""
        formats = parse_format(small), parse_format(large)
        return sum(formats[1].nbytes(w.shape) - formats[0].nbytes(w.shape) for w in self.weights)

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


def bits_of(
    raised: Sequence[MixedPart], others: Sequence[MixedPart], large: str, small: str
) -> float:
    """Bits a weight, palettes counted, of some parts in the larger of two formats."""
    sizes = [
        (parse_format(name).nbytes(weight.shape), weight.elements)
        for parts, name in ((raised, large), (others, small))
        for part in parts
        for weight in part.weights
    ]
    return 8 * sum(size for size, _ in sizes) / sum(elements for _, elements in sizes)


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
