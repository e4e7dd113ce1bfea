"""Options that several families have: keys of a recipe's `[family]` table."""

from typing import Annotated, Literal

from pydantic import Field

from cetane.validation import Data


class ResidualOptions(Data):
    """Of a family whose residual stream may be smaller than the model's.

    Released models have streams that leave fp16. All that reads the stream is normed first, so the
    whole of it can be smaller by a constant: what writes it is multiplied, and the epsilons of the
    norms are multiplied by the square.
    """

    residual_scale: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    """The residual stream is the model's times this; a power of two is exact. A build replaces
    `auto` by the power that `cetane.pipeline.calibrate` finds; a plan alone takes 1."""

    @property
    def scale(self) -> float:
        return 1.0 if self.residual_scale == "auto" else self.residual_scale


def residual_eps(eps: float, scale: float) -> float:
    """The epsilon of a norm whose input is `scale` times the model's: what it gives is the same."""
    return eps * scale**2
