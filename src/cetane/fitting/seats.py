"""Where a transformers model holds the weights that are fitted."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from cetane.families import Weight, Weights
from cetane.fitting.experts import modules_of_experts


@dataclass(frozen=True)
class Seat:
    """Where a weight `(O, I)` stands: in all of a parameter, in some rows or columns, or in some
    experts."""

    name: str
    """The checkpoint's name of the parameter."""
    parameter: nn.Parameter
    part: Weight | None = None
    """The weight that is a part of the parameter; None for all of it."""

    def read(self, tensor: Tensor) -> Tensor:
        """The weight's part of a tensor of the parameter's shape, `(O, I)`: its values, or their
        gradients."""
        if self.part is None:
            return tensor
        if self.part.of_experts:
            return torch.cat(views_of(self.part, tensor), int(self.part.side_by_side))
        assert self.part.part_pick is not None
        return self.part.part_pick(tensor).contiguous()

    def stored(self, source: Weights) -> Tensor:
        """The weight as the checkpoint has it, `(O, I)`, without the family's factor."""
        if self.part is None:
            return source.read(self.name)
        return replace(self.part, factor=1.0).read(source)

    def write(self, values: Tensor) -> None:
        """Let the model compute with these values `(O, I)`, rounded to the parameter's dtype."""
        tensor = self.parameter.data
        if self.part is None:
            tensor.copy_(values)
        elif self.part.of_experts:
            views = views_of(self.part, tensor)
            own = values.tensor_split(len(views), int(self.part.side_by_side))
            for view, one in zip(views, own, strict=True):
                view.copy_(one)
        else:
            assert self.part.part_pick is not None
            self.part.part_pick.put(values, tensor)


def is_linear(module: nn.Module) -> bool:
    """Whether a module of a transformers model is a linear layer. GPT-2's keep their weights
    transposed."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | Conv1D)


def upright(layer: nn.Module) -> Tensor:
    """The weight of a linear layer as `(O, I)`, a view."""
    weight: Tensor = layer.get_parameter("weight").data
    return weight if isinstance(layer, nn.Linear) else weight.T


def put(weight: Tensor, layer: nn.Module) -> None:
    """Let a linear layer compute with a weight `(O, I)`."""
    kept = weight if isinstance(layer, nn.Linear) else weight.T
    layer.get_parameter("weight").data = kept


def linear_layers(
    model: Any, names: Mapping[str, str], wanted: Container[str]
) -> dict[str, nn.Module]:
    """The linear layers of a model whose weights are wanted, by the checkpoint's names."""
    return {
        names[path]: module
        for path, module in model.named_modules()
        if is_linear(module) and names.get(path) in wanted
    }


def seats_in(
    model: Any,
    names: Mapping[str, str],
    tensors: Mapping[str, Mapping[str, str]],
    matrices: Container[str],
    parts: Mapping[str, Weight],
) -> dict[str, Seat]:
    """The seats of some matrices in a transformers model, by their names.

    `names` are the checkpoint's, by the path of a layer; `tensors` those of all tensors of a
    module, by its path. `parts` are the weights that are no whole matrix of the checkpoint. Only
    linear layers and modules of experts have seats.
    """
    seats: dict[str, Seat] = {}
    parameters: dict[str, Any] = {}
    for name, layer in linear_layers(model, names, {*names.values()}).items():
        parameters[name] = layer.get_parameter("weight")
        if name in matrices:
            seats[name] = Seat(name, parameters[name])
    for module, own in modules_of_experts(model, tensors):
        parameters |= {name: getattr(module, tensor) for tensor, name in own.items()}
    for matrix, part in parts.items():
        if part.name in parameters:
            seats[matrix] = Seat(part.name, parameters[part.name], part)
    return seats


def views_of(weight: Weight, stored: Tensor) -> list[Tensor]:
    """The parts `(O, I)` of the stacked tensor that make a weight, one for each expert: views.

    Experts lie side by side in what they multiply last, else one below the other.
    """
    assert weight.rows is not None
    one_by_one = (stored[expert : expert + 1] for expert in range(*weight.rows))
    return [one[0] if weight.pick is None else weight.pick(one) for one in one_by_one]


def own_copy(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> nn.Parameter:
    """The parameter, with memory that may be changed: its values may be pages of a file."""
    parameter.data = parameter.data.to(dtype or parameter.dtype, copy=True)
    return parameter
