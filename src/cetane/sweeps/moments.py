"""The second moments of a model: mean squares of its projections' inputs, on a text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cetane.compress import Sensitivities
from cetane.errors import CetaneError
from cetane.gates.compressions import Judge


class Watcher(TorchFunctionMode):
    """Watches every convolution, in any module, and sums the squares of its input."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names` are those of the weights, by the id of their parameter."""
        super().__init__()
        self.names = names
        self.sums: dict[str, Tensor] = {}
        self.columns: dict[str, int] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.conv2d, torch.nn.functional.conv2d):
            x, weight = args[:2]
            name = self.names.get(id(weight))
            if name is not None and x.shape[1] == weight.shape[1]:
                squares = x.double().square().sum((0, 2, 3))
                self.sums[name] = self.sums.get(name, torch.zeros_like(squares)) + squares
                self.columns[name] = self.columns.get(name, 0) + x[0, 0].numel()
        return func(*args, **(kwargs or {}))


def measure(judge: Judge, tokens: Sequence[int]) -> Sensitivities:
    """Sensitivities of the judge's model, with its current weights, on a text.

    If a weight is used in another way than in a full convolution, all its inputs get one value.
    Raises CetaneError for a text that is shorter than one call: padding would be measured.
    """
    width = judge.planner.recipe.tokens.prefill or 1
    whole = tokens[: len(tokens) // width * width]
    if not whole:
        raise CetaneError(
            f"{len(tokens)} tokens are too few to measure sensitivities; give at least {width}"
        )
    weights = {
        id(p.block.get_parameter(p.path)): p.weight for p in judge.parameters if p.weight.kind
    }
    watcher = Watcher({key: weight.name for key, weight in weights.items()})
    # a window of a context that is no multiple of the call's width would end in padding
    step = judge.planner.recipe.cache.context // width * width or width
    with watcher:
        for start in range(0, len(whole), step):
            for _ in judge.read(whole[start : start + step]):
                pass
    means = {w.name: np.ones(w.shape[1], np.float32) for w in weights.values()}
    for name, total in watcher.sums.items():
        means[name] = (total / watcher.columns[name]).numpy().astype(np.float32)
    return Sensitivities(means)
