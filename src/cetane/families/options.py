"""Options that several families have: keys of a recipe's `[family]` table."""

from typing import Annotated, Literal

from pydantic import Field

from cetane.validation import Data


class ResidualOptions(Data):
    """Options of a family whose residual stream can be scaled down.

    The streams of some released models exceed fp16. Every reader of the stream norms it first, so a
    constant factor on the stream changes nothing. The factor multiplies all that is written into
    the stream, and its square multiplies the epsilons of the norms.
    """

    residual_scale: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    """The factor from the model's residual stream to the port's; a power of two is exact. A build
    replaces `auto` by the power that `cetane.pipeline.calibration.calibrate` measures. A plan alone
    takes 1."""

    @property
    def scale(self) -> float:
        return 1.0 if self.residual_scale == "auto" else self.residual_scale


def residual_eps(eps: float, scale: float) -> float:
    """The epsilon of a norm whose input is `scale` times the model's: its output stays the same."""
    return eps * scale**2
