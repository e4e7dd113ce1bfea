"""Rotary tables: cosines and sines by position, with inverse frequencies from transformers."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cetane.families.configs import LARGEST, LARGEST_HEAD, invalid, unsupported

STATIC = ("default", "linear", "llama3", "yarn", "proportional", "dynamic")
"""The rope types whose frequencies do not depend on the length of the text.

Those of `dynamic` do so beyond `max_position_embeddings`, where a port's context ends.
"""


class RotaryConfig(Protocol):
    """The keys that are read from a transformers config."""

    model_type: str
    rope_parameters: dict[str, Any]
    """The parameters of all layers, or a table of them for each type of layer."""


@dataclass(frozen=True)
class RotaryTable:
    """Inverse frequencies, fp32 `(D / 2,)`, and the factor on cosines and sines."""

    inverse_frequencies: Tensor
    scale: float = 1.0

    @property
    def width(self) -> int:
        """The channels of an attention head that get a position."""
        return 2 * self.inverse_frequencies.numel()

    def cos_sin(self, positions: int) -> Tensor:
        """fp32 `(2, positions, D)`: cosines, then sines, of half-split pairs."""
        angles = torch.outer(torch.arange(positions).float(), self.inverse_frequencies)
        angles = torch.cat([angles, angles], dim=-1)
        return torch.stack([angles.cos(), angles.sin()]) * self.scale


def first_positions(config: RotaryConfig, positions: int) -> int:
    """The positions before a model's texts were made longer, by default all of them. CetaneError if
    the parameters give no such number."""
    trained = config.rope_parameters.get("original_max_position_embeddings", positions)
    if not isinstance(trained, int | float) or not 1 <= trained <= LARGEST:
        raise invalid(config.model_type, f"original_max_position_embeddings = {trained!r}")
    return int(trained)


def to_halves(rows: Tensor) -> Tensor:
    """Rows `(..., P, C)` of rotary pairs (0, 1), (2, 3) ... as two halves."""
    return rows.unflatten(-2, (-1, 2)).transpose(-2, -3).flatten(-3, -2)


def last_to_halves(x: Tensor) -> Tensor:
    """The same, of pairs along the last axis `(..., P)`."""
    return to_halves(x[..., None])[..., 0]


def rotary_table(
    config: RotaryConfig, dim: int, layer_type: str | None = None, part: Any = None
) -> RotaryTable:
    """The table for attention heads of width `dim`.

    `layer_type` chooses the parameters, if the config has some for each type of layer. `part` is
    the share of channels that get positions, by default what the parameters of that type say.
    CetaneError for parameters that give no table, and for a head that no model has.
    """
    model_type = config.model_type
    if dim > LARGEST_HEAD:
        raise invalid(model_type, f"a head has {dim} channels, more than {LARGEST_HEAD}")
    parameters = parameters_of(config, layer_type)
    kind = parameters.get("rope_type", "default")
    # its context ends where the second table begins: `decoder_model`
    longrope = kind == "longrope" and layer_type is None and part is not None
    if kind not in STATIC and not longrope:
        known = ", ".join(STATIC)
        raise unsupported(model_type, f"rope type {kind!r} (known: {known})")
    theta = parameters.get("rope_theta")
    if not isinstance(theta, int | float) or not 0 < theta < torch.finfo(torch.float).max:
        raise invalid(model_type, f"rope_theta = {theta!r}, not a positive number")
    # Without layer types, transformers rotates whole heads and ignores the factor.
    if part is None:
        part = 1.0 if layer_type is None else parameters.get("partial_rotary_factor", 1.0)
    width = rotary_width(model_type, dim, kind, part)
    if kind == "default":
        return of_base(theta, width)
    frequencies, scale = of_transformers(config, kind, layer_type)
    if not frequencies.isfinite().all():
        raise invalid(model_type, f"rope parameters of type {kind} give no finite frequencies")
    if 2 * frequencies.numel() != width:  # transformers fails on such a head
        factor = parameters.get("partial_rotary_factor", 1.0)
        raise unsupported(
            model_type,
            f"rope type {kind!r} with partial_rotary_factor = {factor!r}, which gives "
            f"positions to {2 * frequencies.numel()} of {width} channels of a head",
        )
    return RotaryTable(frequencies, scale)


def of_base(theta: float, width: int) -> RotaryTable:
    """The table of a base, for `width` channels."""
    exponents = torch.arange(0, width, 2, dtype=torch.float) / width
    return RotaryTable(1.0 / theta**exponents)


def parameters_of(config: RotaryConfig, layer_type: str | None) -> dict[str, Any]:
    """The parameters of all layers, or of a type of layers."""
    if layer_type is None:
        return config.rope_parameters
    parameters = config.rope_parameters.get(layer_type)
    if not isinstance(parameters, dict):
        raise invalid(config.model_type, f"rope_parameters has no {layer_type!r}")
    return parameters


def rotary_width(model_type: str, dim: int, kind: str, part: Any) -> int:
    """The channels of a head that the table covers. CetaneError for a part that gives no pairs."""
    width = int(dim * part) if isinstance(part, int | float) and 0 < part <= 1 else 0
    if kind == "proportional" and width:  # the other pairs are in the table, with an angle of 0
        width = dim
    if width % 2 or not width:
        raise invalid(
            model_type,
            f"partial_rotary_factor = {part!r} of {dim} channels gives no even number above 0",
        )
    return width


def of_transformers(
    config: RotaryConfig, kind: str, layer_type: str | None
) -> tuple[Tensor, float]:
    """The inverse frequencies of a rope type and the factor on cosines, as transformers computes
    them. It lets wrong parameters pass, and then fails here."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        made: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[kind](
            config, torch.device("cpu"), layer_type=layer_type
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise invalid(config.model_type, f"rope parameters of type {kind}: {error}") from error
    return made
