"""Mixes of palettes whose constants are fitted.

Second-order rounding predicts the KL that the errors of each weight cost. A mix is chosen by these
costs, without another run of the model.
"""

from functools import cached_property

import numpy as np

from cetane.compress import Palette, parse_format
from cetane.families import Weight
from cetane.gates.reference import RESIDENT
from cetane.pipeline.mixed_parts import Mix, MixedPart, best_mix, parts_of
from cetane.planner import Planner
from cetane.planner.encoding import can_be_fitted

NEAR, FINER = 0.1, 0.05
"""Bits a weight: what the first mix has beyond the default, and the step between two mixes."""
UNPREDICTED = (
    "no mix: what weights cost is predicted only by gptq, and only up to "
    f"{RESIDENT >> 30} GiB of fp32"
)


class FittedMixes:
    """The mixes in place of the uniform palettes of a planner's recipe, whose constants are
    fitted."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.compression = planner, planner.recipe.compression

    @cached_property
    def better(self) -> list[Mix]:
        """The best mixes of some sizes, up to as many bits as the recipe allows."""
        most = self.compression.mix_to
        if most is None or self.compression.fitted is None:
            return []
        least = parse_format(self.compression.default).bits + NEAR
        sizes = [*np.arange(least, most, FINER).tolist(), most]
        return [mix for size in sizes if (mix := self.best(size)) is not None]

    @property
    def unmixed(self) -> str | None:
        """Why there is no mix, though the recipe allows one; None if there are some."""
        most = self.compression.mix_to
        if most is None or self.better:
            return None
        if not self.harmed[1]:
            return UNPREDICTED
        return (
            f"no mix: none of at most {most:g} bits a weight is predicted to be better than "
            f"{self.compression.default} alone (compression.mix_to)"
        )

    def best(self, most: float) -> Mix | None:
        """The mix of least predicted KL with at most `most` bits a weight; None if none is better
        than the recipe's uniform palettes."""
        uniform = parse_format(self.compression.default)
        assert isinstance(uniform, Palette)
        parts, known = self.harmed
        return best_mix(parts, known, uniform, most)

    @cached_property
    def harmed(self) -> tuple[list[MixedPart], dict[str, float]]:
        """The parts whose weights' harms were predicted, and these harms: KL in nats, by name."""
        fitted = self.compression.fitted
        known = {} if fitted is None else fitted.read().harms
        return [p for p in self.parts if all(w.matrix in known for w in p.weights)], known

    @cached_property
    def parts(self) -> list[MixedPart]:
        """The fitted weights in the recipe's default format, as parts by kind and by depth."""
        compression = self.compression

        def kind_of(weight: Weight) -> str | None:
            form = compression.format_for(weight.name, str(weight.kind))
            raisable = form.name == compression.default and can_be_fitted(weight, form)
            return weight.name.rpartition(".")[0].rpartition(".")[2] if raisable else None

        return parts_of(self.planner, kind_of)
