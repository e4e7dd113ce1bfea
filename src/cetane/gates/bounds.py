"""The bounds that hold a transformers model's activations: the model shows them while it runs.

A bound is a number of a clamp, the factor behind the tanh of a softcap, or the part of a logit
below which experts are far. Few tokens reach one. So the gates also make clamps tighter, until
every token reaches them.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")
"""The names of torch's functions that bound a tensor by numbers. Those with a `_` behind them do it
in place."""
MIXER = "sparsemixer"
"""transformers' function that compares with the bound below which experts are far."""
CETANE = f"{__name__.partition('.')[0]}."
"""The beginning of the names of cetane's modules."""


class Held(NamedTuple):
    """What a line of a model's code holds by bounds."""

    bounds: tuple[float, ...]
    magnitude: float
    """The mean magnitude of the tensor that it holds; infinity if no clamp holds it."""


class Bounds(TorchFunctionMode):
    """A context that notes bounds while a model's modules run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.noted: dict[tuple[str, int], Held] = {}
        """The bounds of each call of a function, by the path of the module and the line."""
        self._paths = {module: path for path, module in model.named_modules()}
        self._tanh: Tensor | None = None
        """The last call's result, if it was a tanh."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = named_by(func)
        softcap = name == "mul" and self._tanh is not None and args[0] is self._tanh
        far = name in ("gt", "__gt__") and calling(sys._getframe(1)).f_code.co_name == MIXER
        if softcap or far or clamps(func, args):
            numbers = [v for v in (*args[1:], *named.values()) if isinstance(v, int | float)]
            whole = softcap or far
            magnitude = np.inf if whole else float(torch.linalg.vector_norm(args[0], 1))
            held = Held(tuple(map(float, numbers)), magnitude / args[0].numel())
            caller = sys._getframe(1)
            self._note(calling(caller) if far else caller, held)
        result = func(*args, **named)
        self._tanh = result if name == "tanh" else None
        return result

    def _note(self, caller: FrameType, held: Held) -> None:
        """Note the bounds of a call, for the module whose method made it, at any depth.

        cetane's own code, which runs beside the model's, sets none."""
        if caller.f_globals["__name__"].startswith(CETANE):
            return
        frame: FrameType | None = caller
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._paths:
                self.noted[self._paths[owner], caller.f_lineno] = held
                return
            frame = frame.f_back


def calling(frame: FrameType) -> FrameType:
    """The frame of the model's code, behind those of other contexts that pass its calls on."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


class Tightened(TorchFunctionMode):
    """A context in which clamps have other bounds."""

    def __init__(self, others: Mapping[float, float]) -> None:
        """`others` are by the bounds that they replace, in fp16."""
        super().__init__()
        self.others = others

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        if clamps(func, args):
            args = (args[0], *map(self._tight, args[1:]))
            named = {name: self._tight(value) for name, value in named.items()}
        return func(*args, **named)

    def _tight(self, value: Any) -> Any:
        number = isinstance(value, int | float)
        return self.others.get(float(np.float16(value)), value) if number else value


def named_by(func: Any) -> str:
    """The name of a torch function, without the `_` of one that works in place."""
    return str(getattr(func, "__name__", "")).removesuffix("_")


def clamps(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call of a torch function bounds a tensor of floats by numbers."""
    return named_by(func) in CLAMPS and bool(args[0].is_floating_point())
