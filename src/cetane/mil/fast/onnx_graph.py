"""An ONNX graph under construction."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.arrays import HELD_AS, held
from cetane.mil.fast.attention_stage import View
from cetane.mil.program import SizeRange

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own ops."""

_ELEMENTS = {
    np.float32: TensorProto.FLOAT, np.bool_: TensorProto.BOOL, np.int32: TensorProto.INT32
}  # fmt: skip


def onnx_type(dtype: str) -> int:
    """The ONNX element type that holds a MIL dtype. CetaneError if there is none."""
    if dtype not in HELD_AS:
        raise CetaneError(f"the fast executor has no arrays of {dtype}")
    return _ELEMENTS[HELD_AS[dtype]]


@dataclass(frozen=True)
class Tensor:
    """A value of the MIL program: its ONNX name, and its shape and dtype in the program."""

    name: str
    shape: tuple[int | SizeRange, ...]
    dtype: str

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        return onnx_type(self.dtype) == TensorProto.FLOAT


@dataclass(frozen=True)
class Node:
    """An ONNX node: op type, names of inputs and results, and attributes sorted by name.

    `op` names the MIL op that it is a part of, for errors.
    """

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[tuple[str, Any], ...]
    op: str = field(compare=False)

    @property
    def name(self) -> str:
        """A name of its own that tells the op."""
        return f"{self.op}|{self.outputs[0]}"


@dataclass(frozen=True)
class OnnxWeight:
    """A large constant, computed when a session needs it. Weights with the same key are equal."""

    key: Hashable
    shape: tuple[int, ...]
    element: int
    """Its ONNX element type."""
    array: Callable[[], Array] = field(compare=False, repr=False)


@dataclass
class OnnxGraph:
    """Nodes, constants and interface.

    Inner names are numbered in the order of creation, so functions of the same structure become
    equal graphs. A call of the graph adds a node:

        y = graph("Add", x, graph.floats(1e-5))
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    literals: dict[str, Array] = field(default_factory=dict)
    weights: dict[str, OnnxWeight] = field(default_factory=dict)
    views: dict[str, View] = field(default_factory=dict)
    op: str = ""
    """The MIL op of the nodes that are added now: its kind and name."""

    def __call__(self, kind: str, *inputs: Tensor | str, **attributes: Any) -> str:
        """Add a node with one result, and return the result's name."""
        (result,) = self.several(kind, inputs, 1, **attributes)
        return result

    def several(
        self, kind: str, inputs: Sequence[Tensor | str], count: int, **attributes: Any
    ) -> tuple[str, ...]:
        """Add a node with `count` results."""
        base = self._name(kind)
        results = (base, *(f"{base}.{index}" for index in range(1, count)))
        names = tuple(item if isinstance(item, str) else item.name for item in inputs)
        self.nodes.append(Node(kind, names, results, tuple(sorted(attributes.items())), self.op))
        return results

    def floats(self, value: float | Sequence[float]) -> str:
        return self.literal(np.array(value, np.float32))

    def ints(self, value: int | Sequence[int]) -> str:
        """An int64 constant: the type of ONNX's own shapes, axes and positions."""
        return self.literal(np.array(value, np.int64))

    def bools(self, value: Sequence[bool]) -> str:
        return self.literal(np.array(value, np.bool_))

    def literal(self, array: Array) -> str:
        """A small constant, stored in the graph itself."""
        name = self._name("literal")
        self.literals[name] = array
        return name

    def weight(self, weight: OnnxWeight) -> str:
        name = self._name("weight")
        self.weights[name] = weight
        return name

    def indices(self, values: Sequence[int] | Tensor) -> str:
        """Positions or sizes as int64: a list that is known now, or a value of the graph."""
        if isinstance(values, Tensor):
            return self("Cast", values, to=TensorProto.INT64)
        return self.ints(values)

    def like(self, value: float, x: Tensor) -> str:
        """A scalar of the same type as `x`."""
        return self.literal(held(np.array(value), x.dtype))

    def cast(self, x: Tensor | str, dtype: str) -> str:
        return self("Cast", x, to=onnx_type(dtype))

    def _name(self, stem: str) -> str:
        # Names in MIL have no colons, so this name is free.
        return f"{stem}:{len(self.nodes) + len(self.literals) + len(self.weights)}"
