"""The base of every family: blocks, the tensors between them, and their weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cetane.errors import DAMAGED_CHECKPOINT, CetaneError
from cetane.families.layers import Exchange, HeadPick, Held, Leaf, Pick, Projection, RowPick
from cetane.hardware import LARGEST_FP16
from cetane.hardware.notch import cut, on_notch

Flow = dict[str, Tensor]
Memory = dict[str, Callable[..., Any]]
"""What a block's layer keeps of earlier tokens, as one call sees it. By name, functions that add
the call's own tokens: `extend(k, v)` of a cache, `extend(x)` of a history, `extend(rule)` of a
matrix."""
Truth = tuple[str, int]
"""The path of a Hugging Face module, and the index of its output, or of a stream in its output."""


class Weights(Protocol):
    """A source of weights: tensors by canonical name, such as a checkpoint."""

    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, start: int, stop: int) -> Tensor: ...


class ValueSpace(NamedTuple):
    """The space of the values of attention heads, by paths of projections."""

    maker: str
    """The projection that makes the values."""
    reader: str
    """The projection that reads what attention makes of them."""
    width: int
    """A head's channels."""


@dataclass(frozen=True)
class Spaces:
    """The channels of a block that may have another orthogonal basis, by paths of projections."""

    writers: tuple[str, ...] = ()
    """The projections whose outputs are added to the residual stream, as they are or times one
    number. Empty if something else is added too, such as the output of a norm."""
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The projections that read the residual stream, by the path of the norm before them. The
    checkpoint stores that norm's gains as they are."""
    values: ValueSpace | None = None


@dataclass(frozen=True)
class Weight:
    """One parameter of a block, and its place in a checkpoint."""

    name: str
    """Canonical name of the checkpoint's tensor."""
    shape: tuple[int, ...]
    """Shape of the parameter."""
    stored: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    kind: str | None
    """`attention`, `mlp`, `experts`, `head` ...; None for gains and biases, which stay in fp16."""
    rows: tuple[int, int] | None = None
    """The range of the tensor's first axis that the parameter holds; None for all."""
    pick: Pick | None = None
    """None if the parameter is a copy, or a multiple."""
    factor: float = 1.0
    """The factor on what is picked. It keeps the levels of a palette, so constants that were fitted
    to the checkpoint's matrix are multiplied by it too."""
    columns: tuple[int, int] | None = None
    """The range of the last axis, after `pick`, that the parameter holds; None for all."""
    part: str = ""
    """The name of what `pick` takes of a tensor of experts or of rows: "gate_proj"."""

    @property
    def of_experts(self) -> bool:
        """Whether it is a matrix of some experts, of which the checkpoint stacks all."""
        return self.kind == "experts" and self.rows is not None and len(self.stored) == 3

    @property
    def side_by_side(self) -> bool:
        """Whether these experts lie side by side, in what they multiply last: their outputs are
        added. Else they lie one below the other."""
        return self.of_experts and self.name.endswith("down_proj")

    @property
    def row_pick(self) -> RowPick | None:
        """The order of its rows, if that is all in which it differs from the checkpoint's matrix.
        It may lack some, and the checkpoint may store the matrix transposed."""
        return self.pick if isinstance(self.pick, RowPick) and len(self.stored) == 2 else None

    @property
    def head_pick(self) -> HeadPick | None:
        """The rows of each head that it holds transposed, if it does."""
        return self.pick if isinstance(self.pick, HeadPick) else None

    @property
    def part_pick(self) -> RowPick | HeadPick | None:
        """How it takes its rows of the checkpoint's matrix, if not as they are."""
        return self.row_pick or self.head_pick

    @property
    def taken(self) -> slice | Tensor:
        """The rows of the checkpoint's matrix `(O, I)` that it holds, in its order."""
        if isinstance(self.pick, RowPick):
            return self.pick.order(self.stored)
        return slice(*self.rows) if self.rows else slice(None)

    @property
    def matrix(self) -> str:
        """The name of the matrix that it is a part of. The checkpoint has one for each name, but of
        experts, of rows in another order, and of rows that are transposed for each head."""
        if self.part_pick is not None:
            return f"{self.name}.{self.part}"
        if not self.of_experts or self.rows is None:
            return self.name
        return f"{self.name}[{self.rows[0]}:{self.rows[1]}].{self.part}".removesuffix(".")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def read(self, source: Weights) -> Tensor:
        """The parameter, in the checkpoint's dtype unless `pick` or `factor` change it. CetaneError
        for NaN or infinity, or another shape."""
        tensor = source.read_rows(self.name, *self.rows) if self.rows else source.read(self.name)
        wanted = (self.rows[1] - self.rows[0], *self.stored[1:]) if self.rows else self.stored
        if tuple(tensor.shape) != wanted:
            raise CetaneError(
                f"{self.name}: shape {tuple(tensor.shape)} does not fit the config, "
                f"which needs {wanted}"
            )
        check_finite(self.name, tensor)
        if self.pick:
            tensor = self.pick(tensor)
        if self.columns:
            tensor = tensor[..., slice(*self.columns)]
        if self.factor != 1:
            tensor = tensor.float() * self.factor
        return tensor.reshape(self.shape)


Bits = Callable[[Weight], int]
"""A function that gives the bits of one element of a weight under a recipe."""


class Block(nn.Module):
    """The smallest piece that a shard can hold.

    `forward(flow, memory)` reads the tensors named in `reads` from `flow`, and sets those named in
    `writes`. `memory` holds the caches and histories named in `keeps`.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ("hidden",)
    keeps: tuple[str, ...] = ()
    """Names of the model's memory (cache groups, histories, matrices) that this block extends."""
    streams: tuple[str, ...] = ("hidden",)
    """The names of the tensors that are the residual stream."""

    def __init__(self, name: str, layer: int, prefix: str) -> None:
        super().__init__()
        self.name, self.layer, self.prefix = name, layer, prefix

    def truths(self) -> dict[str, Truth]:
        """The truths of the tensors that this block writes: their places in the Hugging Face
        model."""
        return {"hidden": (self.prefix.removesuffix("."), 0)}

    def residuals(self) -> list[Truth]:
        """The truths of the residual stream after this block, if the Hugging Face model shows it
        there."""
        truths = self.truths()
        return [truths[name] for name in self.streams if name in truths]

    def exchanges(self) -> tuple[Exchange, ...]:
        """The places where a factor on channels can move from writers to readers; none by
        default."""
        return ()

    def spaces(self) -> Spaces | None:
        """The channels that a rotation may turn; None if there are none."""
        return None

    @property
    def root(self) -> Block:
        """The block that owns the parameters: itself, or of a part, the whole block."""
        return self

    def weights(self, adapter: str | None = None) -> Iterator[tuple[str, Weight]]:
        """The paths of the root's parameters that this block uses, with their weights.

        With an adapter, its own parameters come after the base's, without the biases that it
        replaces.
        """
        added = {} if adapter is None else dict(self.adapter_weights(adapter))
        replaced = {path.replace(f"adapter_{adapter}.bias", "bias") for path in added}
        for path, module in self.named_modules():
            if isinstance(module, Leaf):
                before = f"{path}." if path else ""
                for name, held in module.held.items():
                    if f"{before}{name}" not in replaced:
                        stored = f"{before}{held.source or name}"
                        shape = tuple(module.get_parameter(name).shape)
                        weight = self.weight(stored, shape, held)
                        yield f"{before}{name}", replace(weight, columns=held.columns)
        yield from added.items()

    def adapter_weights(self, adapter: str | None = None) -> Iterator[tuple[str, Weight]]:
        """The paths of an adapter's own parameters, with their weights; by default, of all."""
        for path, module in self.named_modules():
            if isinstance(module, Projection):
                for name, added in module.adapters.items():
                    if adapter in (None, name):
                        for leaf, weight in added.weights.items():
                            yield f"{path}.adapter_{name}.{leaf}", weight

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        """The weight of a parameter."""
        name, pick, factor = self.prefix + path, held.pick, held.factor
        return Weight(name, shape, held.stored, held.kind, pick=pick, factor=factor)

    def split_contracting(self, bits: Bits) -> None:
        """Cut the projections whose weights are on the notch. Only the maker of a block may call
        this, before plans share it."""
        for path, weight in list(self.weights()):
            parent, _, name = path.rpartition(".")
            module = self.get_submodule(parent)
            if isinstance(module, Projection) and name == "weight":
                outputs, inputs = weight.shape[:2]
                stored = bits(weight)
                at = cut(outputs, inputs, stored) if on_notch(outputs, inputs, stored) else None
                if at is not None:
                    module.split(at)

    def load(self, source: Weights) -> None:
        """Read the parameters that this block uses, in fp32. The root's others become undefined."""
        self.root.to_empty(device="cpu")
        for path, weight in (*self.weights(), *self.adapter_weights()):
            self.root.get_parameter(path).data.copy_(weight.read(source))

    @abstractmethod
    def forward(self, flow: Flow, memory: Memory) -> None: ...


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CetaneError for weights that are not real numbers, not finite, or beyond fp16."""
    largest = largest_of(name, tensor)
    if largest > LARGEST_FP16:
        raise CetaneError(
            f"{name}: its largest value, {largest:.3g}, is beyond fp16 ({LARGEST_FP16:.0f})",
            "download the checkpoint again if it may be damaged: the ANE computes in fp16, so no "
            "recipe can port this value",
        )


def largest_of(name: str, tensor: Tensor) -> float:
    """The largest absolute value of weights. Raises CetaneError for weights that are not real
    numbers, or not finite."""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise CetaneError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, not weights")
    if not tensor.numel():
        return 0.0
    low, high = torch.aminmax(tensor)  # NaN if any is
    largest = float(torch.maximum(low.abs(), high.abs()))
    if largest != largest or largest == float("inf"):
        raise CetaneError(f"{name} holds NaN or infinity", DAMAGED_CHECKPOINT)
    return largest


class Part(Block):
    """A piece of a block that can be a function of its own. It uses the block's parameters."""

    def __init__(
        self,
        name: str,
        whole: Block,
        modules: tuple[str, ...],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        run: Callable[[Flow], None],
    ) -> None:
        """`modules` are the paths of the submodules that `run` uses."""
        super().__init__(name, whole.layer, whole.prefix)
        self._whole = (whole,)  # in a tuple, so that torch does not count it as a submodule
        self.modules_used, self.reads, self.writes, self.run = modules, reads, writes, run

    def truths(self) -> dict[str, Truth]:
        return {name: t for name, t in self.root.truths().items() if name in self.writes}

    @property
    def root(self) -> Block:
        return self._whole[0]

    def weights(self, adapter: str | None = None) -> Iterator[tuple[str, Weight]]:
        used = tuple(f"{path}." for path in self.modules_used)
        return ((path, w) for path, w in self.root.weights(adapter) if path.startswith(used))

    def adapter_weights(self, adapter: str | None = None) -> Iterator[tuple[str, Weight]]:
        used = tuple(f"{path}." for path in self.modules_used)
        return (item for item in self.root.adapter_weights(adapter) if item[0].startswith(used))

    def forward(self, flow: Flow, memory: Memory) -> None:
        self.run(flow)


class RoutedBlock(Block):
    """A block that sends each token to one of its experts, or to several.

    As a block it computes all experts and weighs their outputs. Its parts let an engine run only
    the chosen ones. `router()` writes `scores (1, experts, 1, T)`; the largest channel chooses.
    Each part of `experts()` writes the block's outputs, for the tokens that chose it.

    If the block `adds`, every channel that is not zero chooses. Then each part writes what its
    experts add to the block's outputs.
    """

    scores: ClassVar[str] = "scores"
    deciding: ClassVar[str]
    """The path of the projection that makes the logits of its experts."""
    adds: ClassVar[bool] = False
    chosen = 1
    """The number of experts of a token."""
    together = 1
    """The number of experts in each part, but for the last."""
    routable = True
    """Whether a token needs only the experts that it chooses."""
    bounded = False
    """Whether an expert shares its weight with those within a bound below it. The others are
    *far*."""

    def compared(self, flow: Flow) -> tuple[Tensor, ...]:
        """What chooses experts, `(1, experts, 1, T)`, when the router has run. If they are
        `bounded`, 1 for far experts follows, for each expert that a token takes."""
        return (flow[self.scores],)

    @abstractmethod
    def router(self) -> Part: ...

    @abstractmethod
    def experts(self) -> tuple[Part, ...]: ...
