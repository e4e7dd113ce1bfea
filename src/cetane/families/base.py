"""What a family is made of: blocks, the tensors that flow between them, and their weights."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.flow import Source
from cetane.families.layers import Order, Projection, RMSNorm
from cetane.families.rotary import RotaryTable

Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Flow = dict[str, Tensor]


class Weights(Protocol):
    """Where blocks take their weights from: tensors by canonical name (a checkpoint is one)."""

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Weight:
    """One parameter of a block: its canonical name, shape, and what compression calls it."""

    name: str
    shape: tuple[int, ...]
    kind: str | None
    """`attention`, `mlp`, `head`; None for gains and biases, which stay in fp16."""

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Its shape in a checkpoint, where a 1x1 convolution is a matrix."""
        return self.shape[:2]


class Block(nn.Module):
    """The smallest piece that a shard can hold.

    `forward(flow, extend)` reads the tensors named in `reads` from `flow` and sets those named in
    `writes`; `extend` is the cache of this layer, None for a block without `group`.
    """

    reads: tuple[str, ...] = ()
    writes: ClassVar[tuple[str, ...]] = ("hidden",)
    group: str | None = None
    """The cache group of this block's keys and values."""

    def __init__(self, name: str, prefix: str) -> None:
        super().__init__()
        self.name, self.prefix = name, prefix

    def canonical(self, parameter: str) -> str:
        """The checkpoint's name of a parameter."""
        return self.prefix + parameter

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Parameter names of this module, with what stands behind them."""
        kinds = {
            f"{path}.weight": module.kind
            for path, module in self.named_modules()
            if isinstance(module, Projection)
        }
        for path, parameter in self.named_parameters():
            shape = tuple(parameter.shape)
            yield path, Weight(self.canonical(path), shape, kinds.get(path))

    def load(self, source: Weights) -> None:
        """Materialise the parameters in fp32; refuses NaN, infinity and what fp16 cannot hold."""
        self.to_empty(device="cpu")
        for path, weight in self.weights():
            tensor = self.pick(source.read(weight.name)).float()
            check_finite(weight.name, tensor)
            if tuple(tensor.shape) != weight.stored_shape:
                raise CetaneError(
                    f"{weight.name}: shape {tuple(tensor.shape)} does not fit the config, "
                    f"which needs {weight.stored_shape}"
                )
            parameter = self.get_parameter(path)
            parameter.data.copy_(tensor.reshape(parameter.shape))

    def pick(self, tensor: Tensor) -> Tensor:
        """The part of a checkpoint tensor that this block holds."""
        return tensor


def check_finite(name: str, tensor: Tensor) -> None:
    """CetaneError for weights that no port can be right with."""
    if not bool(torch.isfinite(tensor).all()):
        raise CetaneError(
            f"{name}: holds NaN or infinity", "the checkpoint is damaged: get it again"
        )
    largest = float(tensor.abs().max()) if tensor.numel() else 0.0
    if largest > 65504:
        raise CetaneError(f"{name}: largest value {largest:.3g} is beyond fp16 (65504)")


class Head(Block):
    """Final norm and one slice of the output projection: hidden -> logits of `start..stop`."""

    writes: ClassVar[tuple[str, ...]] = ("logits",)
    reads = ("hidden",)

    def __init__(
        self, index: int, start: int, stop: int, hidden: int, eps: float, norm: str, table: str
    ) -> None:
        super().__init__(f"head-{index}", "")
        self.start, self.stop = start, stop
        self.names = {"norm.weight": norm, "lm_head.weight": table}
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = Projection(hidden, stop - start, "head")

    def canonical(self, parameter: str) -> str:
        return self.names[parameter]

    def pick(self, tensor: Tensor) -> Tensor:
        return tensor[self.start : self.stop] if tensor.dim() == 2 else tensor

    def forward(self, flow: Flow, extend: Extend | None) -> None:
        flow["logits"] = self.lm_head(self.norm(flow["hidden"]))


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have equal shape: query heads, key/value heads and their width."""

    query: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Model:
    """A checkpoint's architecture in ANE form; blocks live on torch's meta device until loaded."""

    order: Order
    hidden: int
    vocab: int
    eps: float
    layers: tuple[Block, ...]
    embedding: str
    norm: str
    output: str
    """Canonical name of the output projection; the embedding's when they are tied."""
    host: dict[str, Source]
    """What the host supplies, by the name that blocks read it under."""
    groups: dict[str, CacheGroup]
    rotary: dict[str, RotaryTable]
    max_context: int

    def heads(self, slices: int) -> list[Head]:
        """The output projection in `slices` parts of the vocabulary, cut at multiples of 32 rows
        (so that palettes' groups fit) where it is large enough."""
        if slices > self.vocab:
            raise CetaneError(f"head.slices = {slices}: the vocabulary has only {self.vocab} rows")
        unit = 32 if self.vocab >= 32 * slices else 1
        cuts = [self.vocab * i // slices // unit * unit for i in range(slices)] + [self.vocab]
        with torch.device("meta"):
            return [
                Head(index, start, stop, self.hidden, self.eps, self.norm, self.output)
                for index, (start, stop) in enumerate(pairwise(cuts))
            ]
