"""The bounds that hold a transformers model's activations: the model shows them while it runs.

A bound is a number of a clamp, or the factor behind the tanh of a softcap.
"""

import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CLAMPS = ("clamp", "clip", "clamp_min", "clamp_max")
"""The names of torch's functions that bound a tensor by numbers. Those with a `_` behind them do it
in place."""
CETANE = f"{__name__.partition('.')[0]}."
"""The beginning of the names of cetane's modules."""


class Bounds(TorchFunctionMode):
    """A context that notes bounds while a model's modules run."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.noted: dict[tuple[str, int], tuple[float, ...]] = {}
        """The bounds of each call of a function, by the path of the module and the line."""
        self._paths = {module: path for path, module in model.named_modules()}
        self._tanh: Tensor | None = None
        """The last call's result, if it was a tanh."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "").removesuffix("_")
        softcap = name == "mul" and self._tanh is not None and args[0] is self._tanh
        if softcap or (name in CLAMPS and args[0].is_floating_point()):
            numbers = [v for v in (*args[1:], *named.values()) if isinstance(v, int | float)]
            self._note(sys._getframe(1), tuple(map(float, numbers)))
        result = func(*args, **named)
        self._tanh = result if name == "tanh" else None
        return result

    def _note(self, caller: FrameType, bounds: tuple[float, ...]) -> None:
        """Note the bounds of a call, for the module whose method made it, at any depth.

        cetane's own code, which runs beside the model's, sets none."""
        if caller.f_globals["__name__"].startswith(CETANE):
            return
        frame: FrameType | None = caller
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in self._paths:
                self.noted[self._paths[owner], caller.f_lineno] = bounds
                return
            frame = frame.f_back
