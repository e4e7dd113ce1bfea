"""Histories and matrices: what a layer keeps beside keys and values.

A history holds the last few columns of a small tensor, `(L, C, 1, n)`; its layers call `extend(x)`.
A matrix `(L, heads, keys, groups * values)` holds all earlier tokens at once; its layers call
`extend(rule)`.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from cetane.families.axes import Axes
from cetane.schema.interface import FromHistory, FromMatrix, Input, Output, ToHistory, ToMatrix


@dataclass(frozen=True)
class HistorySpec:
    """A history of layers inside one segment of a shard."""

    owner: str
    name: str
    layers: int
    channels: int
    length: int
    axes: Axes

    def _shape(self, columns: int) -> tuple[int, int, int, int]:
        return (self.layers, *self.axes.shape(self.channels, columns)[1:])

    def input(self) -> Input:
        source = FromHistory(name=f"{self.owner}.{self.name}")
        return Input(name=self.name, shape=self._shape(self.length), source=source)

    def keeper(self, tensors: dict[str, Tensor]) -> "PastColumns":
        return PastColumns(self, tensors)

    def output(self, tokens: int) -> Output:
        sink = ToHistory(name=f"{self.owner}.{self.name}")
        return Output(name=f"{self.name}_out", shape=self._shape(tokens), sink=sink)


class Past:
    """What a function reads of its layers' past, and the new columns that it returns."""

    def __init__(self, spec: "HistorySpec | MatrixSpec", tensors: dict[str, Tensor]) -> None:
        self.spec, self.past = spec, tensors[spec.name]
        self.new: list[Tensor] = []

    def results(self) -> dict[str, Tensor]:
        """The graph output that carries the new columns to their owner."""
        return {f"{self.spec.name}_out": torch.cat(self.new)}


class PastColumns(Past):
    """A history while one function of a shard is traced or run.

    The graph returns its new columns and writes nothing, so a refused draft leaves nothing behind.
    """

    def extend(self, x: Tensor) -> Tensor:
        """The layer's past columns and `x (1, C, 1, T)` after them, `(1, C, 1, n + T)`."""
        layer = len(self.new)
        self.new.append(x)
        return torch.cat([self.past[layer : layer + 1], x], dim=self.spec.axes.time)


@dataclass(frozen=True)
class MatrixSpec:
    """Matrices of layers inside one segment of a shard."""

    owner: str
    name: str
    layers: int
    heads: int
    keys: int
    values: int
    groups: int
    axes: Axes

    def input(self) -> Input:
        shape = (self.layers, self.heads, self.keys, self.groups * self.values)
        source = FromMatrix(name=f"{self.owner}.{self.name}")
        return Input(name=self.name, shape=shape, source=source)

    def output(self, tokens: int) -> Output:
        channels = self.heads * (self.keys + self.groups * (self.values + 1))
        shape = (self.layers, *self.axes.shape(channels, tokens)[1:])
        sink = ToMatrix(name=f"{self.owner}.{self.name}", groups=self.groups)
        return Output(name=f"{self.name}_out", shape=shape, sink=sink)

    def keeper(self, tensors: dict[str, Tensor]) -> "PastMatrix":
        return PastMatrix(self, tensors)


MatrixRule = Callable[[Tensor], tuple[Tensor, tuple[Tensor, Tensor, Tensor]]]
"""A function of a layer's matrix `(1, heads, keys, groups * values)` before the call. It gives its
result, and hidden tensors: keys, values and logarithms of decays of the new tokens."""


class PastMatrix(Past):
    """Matrices while one function of a shard is traced or run.

    The graph reads them and writes nothing. A token adds a matrix of rank one, so its column is
    small. A call with a refused draft needs no copy of the matrix for each of its tokens. The host
    folds the accepted columns in fp32, where rounding does not build up over a long text.
    """

    def extend(self, rule: MatrixRule) -> Tensor:
        """The result of a rule on the layer's matrix; keeps the new columns for `results`."""
        layer = len(self.new)
        result, columns = rule(self.past[layer : layer + 1])
        self.new.append(torch.cat(columns, dim=1))
        return result
