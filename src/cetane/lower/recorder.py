"""Records of the operations of functions, run on shapes without values."""

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from cetane.errors import CetaneError
from cetane.families import SOFTPLUS_MOST
from cetane.lower.tracing import LabelledWeight, example, replaced, without_compiler
from cetane.planner import FunctionGraph, Programs

Array = np.ndarray[Any, Any]

ACTIVATIONS = torch.ops.aten.gelu.default, torch.ops.aten.relu.default, torch.ops.aten.silu.default
"""The ops of the families' activations."""
WITHOUT_EFFECT: dict[Any, list[float]] = {
    torch.ops.aten.softplus.default: [SOFTPLUS_MOST],
    torch.ops.aten.rsub.Scalar: [0, 1],
}
"""The bounds of cetane's own softplus, and of its choice among equal numbers, by the ops that read
what they hold. Neither changes a result."""
EXTREMES = torch.ops.aten.minimum.default, torch.ops.aten.maximum.default
"""The ops that bound a tensor by another one, which may hold one number only."""


class Slice(NamedTuple):
    """The elements `start .. stop` of one axis of a tensor."""

    axis: int
    start: int
    stop: int


class Recorder(TorchDispatchMode):
    """Records every operation, with tensors by name.

    A line gives only the size of a slice that leaves out the end of an axis; `slices` has its
    place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        """One operation a line; the last line names the results."""
        self.slices: list[Slice] = []
        self.scalars: set[float] = set()
        """The floats of all operations: epsilons, factors. Programs round them to fp16."""
        self.epsilons: list[float] = []
        """Those of the norms, in their order."""
        self.activations: list[Callable[[Tensor], Tensor]] = []
        self.bounds: list[float] = []
        """The numbers of clamps, minima and maxima, the factors behind a tanh, and those of what
        decides whether a tensor is larger."""
        self.roundings = 0
        """The number of tensors that are rounded to whole numbers."""
        self._names: dict[int, str] = {}
        self._filled: dict[int, float] = {}
        """The elements of tensors that are filled with one number."""
        self._held: dict[int, list[float]] = {}
        """The bounds of the tensors that have some."""
        self._tanhs: set[int] = set()
        """The results of every tanh."""
        self._scaled: dict[int, float] = {}
        """The factors of tensors that are multiplied by a number."""
        self._alive: list[Tensor] = []
        """Every named tensor, kept alive so that no other takes its address."""

    def name(self, tensor: Tensor, name: str) -> Tensor:
        """Give a tensor a name, unless it has one. Returns the tensor."""
        if id(tensor) not in self._names:
            self._names[id(tensor)] = name
            self._alive.append(tensor)
        return tensor

    def names(self, values: Any) -> Any:
        """The values with tensors replaced by their names, or by their content if unknown."""
        return tree_map(lambda v: self._name_of(v) if isinstance(v, Tensor) else v, values)

    def _name_of(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            if tensor.is_meta:
                shape = tuple(tensor.shape)
                raise CetaneError(f"a block uses a parameter {shape} that is not in its weights()")
            self.name(tensor, content_of(tensor.numpy()))
        return f"%{self._names[id(tensor)]}"

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.scalars.update(v for v in tree_leaves([args, kwargs]) if isinstance(v, float))
        if func is torch.ops.cetane.layer_norm.default:
            self.epsilons.append(args[2])
        if func in ACTIVATIONS:
            self.activations.append(partial(func, **(kwargs or {})))
        bounds = self._bounds_of(func, args)
        self.bounds += bounds
        if func in WITHOUT_EFFECT and self._held.get(id(args[0])) == WITHOUT_EFFECT[func]:
            for bound in WITHOUT_EFFECT[func]:
                self.bounds.remove(bound)
        self.roundings += func is torch.ops.aten.round.default
        named = self.names(args)
        if (place := place_of(func, args)) is not None:
            self.slices.append(place)
            named = (named[0], place.axis, f"{place.stop - place.start} of them")
        called = f"{func}{named}{self.names(kwargs or {})}"
        result = func(*args, **(kwargs or {}))
        tree_map(
            lambda v: self.name(v, str(len(self._alive))) if isinstance(v, Tensor) else v, result
        )
        self.lines.append(f"{self.names(result)} = {called}")
        if func is torch.ops.aten.full.default:
            self._filled[id(result)] = args[1]
        elif func is torch.ops.aten.detach.default and id(args[0]) in self._filled:
            self._filled[id(result)] = self._filled[id(args[0])]
        elif func is torch.ops.aten.tanh.default:
            self._tanhs.add(id(result))
        elif bounds:
            self._held[id(result)] = bounds
        if func is torch.ops.aten.mul.Tensor and isinstance(args[1], int | float):
            self._scaled[id(result)] = args[1]
        return result

    def _bounds_of(self, func: Any, args: tuple[Any, ...]) -> list[float]:
        """The bounds that an operation states."""
        if func in EXTREMES:
            return [self._filled[id(given)] for given in args if id(given) in self._filled]
        if func is torch.ops.aten.gt.Tensor:
            return [self._scaled[id(args[1])]] if id(args[1]) in self._scaled else []
        softcap = func is torch.ops.aten.mul.Tensor and id(args[0]) in self._tanhs
        if softcap or func is torch.ops.aten.clamp.default:
            return [number for number in args[1:] if isinstance(number, int | float)]
        return []


def recorded(planner: Programs, graph: FunctionGraph, used: list[LabelledWeight]) -> Recorder:
    """The record of a run of a function's module, on shapes without values.

    Raises CetaneError for a parameter that no block lists in its weights().
    """
    recorder = Recorder()
    inputs = [example(item, "meta") for item in graph.function.inputs]
    module = planner.module(graph).eval()
    states = {state.name for state in graph.function.states}
    for name, buffer in module.named_buffers():
        if name not in states and not buffer.is_meta:  # a mask, say
            recorder.lines.append(f"{name} {content_of(buffer.numpy())}")
    module = module.to("meta")
    for item, tensor in zip(graph.function.inputs, inputs, strict=True):
        recorder.name(tensor, item.name)
    for name, buffer in module.named_buffers():
        recorder.name(buffer, name)

    places = {item.label: f"weight {place}" for place, item in enumerate(used)}

    def shaped(item: LabelledWeight) -> Tensor:
        return recorder.name(torch.empty(item.weight.shape, device="meta"), places[item.label])

    with replaced(used) as replace, torch.no_grad(), torch.device("meta"), without_compiler():
        replace(shaped)
        with recorder:
            results = module(*inputs)
    recorder.lines.append(str(recorder.names(results)))
    return recorder


def place_of(func: Any, args: tuple[Any, ...]) -> Slice | None:
    """The place of a slice, if its program states start and stop as two numbers, and nothing else
    of the program depends on them.

    None for any other op, and for a slice up to the end of its axis: its program states no stop.
    """
    if func is not torch.ops.aten.slice.Tensor or len(args) != 4:  # a fifth is the step
        return None
    tensor, axis, start, stop = args
    whole = axis >= 0 and 0 <= start < stop < tensor.shape[axis]
    return Slice(axis, start, stop) if whole else None


def content_of(array: Array) -> str:
    """A key that is equal for arrays of equal dtype, shape and bytes."""
    return f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
