"""Rotary tables: inverse frequencies from transformers' own rules, one table per name."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cetane.errors import CetaneError

STATIC = ("default", "linear", "llama3", "yarn")
"""Kinds whose frequencies do not depend on the length of the text."""


@dataclass(frozen=True)
class RotaryTable:
    """Inverse frequencies `(D / 2,)` fp32 and the factor on cosines and sines."""

    inverse_frequencies: Tensor
    scale: float = 1.0

    def cos_sin(self, positions: int) -> Tensor:
        """fp32 `(2, positions, D)`: cosines, then sines, of half-split pairs."""
        angles = torch.outer(torch.arange(positions).float(), self.inverse_frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.stack([angles.cos(), angles.sin()]) * self.scale


def rotary_table(config: Any, dim: int) -> RotaryTable:
    """The table of a transformers config for heads of width `dim`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC:
        raise CetaneError(f"rope type {kind!r} is not supported; known: {', '.join(STATIC)}")
    # transformers lets other values pass, and fails or computes NaN later.
    invalid = f"config.json of a {config.model_type} model is not valid"
    theta = parameters.get("rope_theta")
    if not isinstance(theta, int | float) or not 0 < theta < torch.finfo(torch.float).max:
        raise CetaneError(f"{invalid}: rope_theta = {theta!r}, not a positive number")
    if kind == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float) / dim
        return RotaryTable(1.0 / theta**exponents)
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    except (TypeError, ValueError, ArithmeticError) as error:
        raise CetaneError(f"{invalid}: rope parameters of type {kind}: {error}") from error
    if not frequencies.isfinite().all():
        raise CetaneError(f"{invalid}: rope parameters of type {kind} give no finite frequencies")
    if 2 * frequencies.numel() != dim:
        raise CetaneError(f"rotary embedding of a part of each head ({kind}) is not supported")
    return RotaryTable(frequencies, scale)
