"""What a family is made of: blocks, the tensors that flow between them, and their weights."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.layers import Held, Leaf, Projection, RMSNorm
from cetane.families.rotary import RotaryTable
from cetane.hardware.notch import cut, on_notch
from cetane.schema.interface import Source, TokenIds
from cetane.schema.subset import Ids

Flow = dict[str, Tensor]
Memory = dict[str, Callable[..., Any]]
"""What a block's layer remembers, by name: `extend(k, v)` of a cache, `extend(x)` of a history."""
Truth = tuple[str, int]
"""Path of a Hugging Face module, and which of its outputs."""


class Weights(Protocol):
    """Where blocks take their weights from: tensors by canonical name (a checkpoint is one)."""

    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Exchange:
    """Projections that read some channels, and the tensors that write them.

    What multiplies the channels of the writers, and divides those of the readers, changes nothing.
    """

    readers: tuple[str, ...]
    """Paths of projections in a block."""
    writers: tuple[str, ...]
    """Paths of parameters, along their first axis."""
    channels: tuple[int, int, int] = (1, 1, -1)
    """The channels that are read, as an array whose middle axis is written once: the query heads of
    a key/value head."""


@dataclass(frozen=True)
class Weight:
    """One parameter of a block, and where a checkpoint keeps it."""

    name: str
    """Canonical name of the checkpoint's tensor."""
    shape: tuple[int, ...]
    """Of the parameter."""
    stored: tuple[int, ...]
    """Shape of the checkpoint's tensor."""
    kind: str | None
    """`attention`, `mlp`, `experts`, `head` ...; None for gains and biases, which stay in fp16."""
    rows: tuple[int, int] | None = None
    """The part of the tensor, along its first axis, that the parameter is; None for all of it."""
    pick: Callable[[Tensor], Tensor] | None = None
    """What the parameter takes of the tensor, where it is neither all of it nor rows."""
    columns: tuple[int, int] | None = None
    """The part of the tensor, along its last axis, that the parameter is; None for all of it."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def read(self, source: Weights) -> Tensor:
        """The parameter, in the checkpoint's dtype unless `pick` says another; refuses NaN and
        infinity."""
        tensor = source.read_rows(self.name, *self.rows) if self.rows else source.read(self.name)
        wanted = (self.rows[1] - self.rows[0], *self.stored[1:]) if self.rows else self.stored
        if tuple(tensor.shape) != wanted:
            raise CetaneError(
                f"{self.name}: shape {tuple(tensor.shape)} does not fit the config, "
                f"which needs {wanted}"
            )
        check_finite(self.name, tensor)
        if self.columns:
            tensor = tensor[..., slice(*self.columns)]
        return (self.pick(tensor) if self.pick else tensor).reshape(self.shape)


Bits = Callable[[Weight], int]
"""The bits of one element of a weight, as a recipe stores it."""


class Block(nn.Module):
    """The smallest piece that a shard can hold.

    `forward(flow, memory)` reads the tensors named in `reads` from `flow` and sets those named in
    `writes`; `memory` holds what its layer remembers, by the names in `keeps`.
    """

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ("hidden",)
    keeps: tuple[str, ...] = ()
    """Names of the model's memory (cache groups and histories) that this block extends."""

    def __init__(self, name: str, layer: int, prefix: str) -> None:
        super().__init__()
        self.name, self.layer, self.prefix = name, layer, prefix

    def truths(self) -> dict[str, Truth]:
        """Where the Hugging Face model has the tensors that this block writes."""
        return {"hidden": (self.prefix.removesuffix("."), 0)}

    def exchanges(self) -> tuple[Exchange, ...]:
        """Places where a factor on channels can move from what writes them to what reads them;
        none where the family offers none."""
        return ()

    @property
    def root(self) -> "Block":
        """The block whose parameters these are; itself, unless it is a part."""
        return self

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Paths of the root's parameters that are used, with what stands behind them."""
        for path, module in self.named_modules():
            if isinstance(module, Leaf):
                for name, held in module.held.items():
                    full, stored = (
                        f"{path}.{leaf}" if path else leaf
                        for leaf in (name, "weight" if held.columns else name)
                    )
                    shape = tuple(module.get_parameter(name).shape)
                    yield full, replace(self.weight(stored, shape, held), columns=held.columns)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        """What stands behind a parameter."""
        return Weight(self.prefix + path, shape, held.stored, held.kind, pick=held.pick)

    def split_contracting(self, bits: Bits) -> None:
        """Cut the projections whose weights are on the notch. Only the maker of a block calls this,
        before plans share it."""
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
        """Materialise the parameters in fp32."""
        self.to_empty(device="cpu")
        for path, weight in self.weights():
            self.get_parameter(path).data.copy_(weight.read(source))

    @abstractmethod
    def forward(self, flow: Flow, memory: Memory) -> None: ...


def check_finite(name: str, tensor: Tensor) -> None:
    """CetaneError for weights that no port can be right with."""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise CetaneError(f"{name}: holds {str(tensor.dtype).removeprefix('torch.')}, not weights")
    if not tensor.numel():
        return
    low, high = torch.aminmax(tensor)  # NaN if any is
    largest = float(torch.maximum(low.abs(), high.abs()))
    if largest != largest or largest == float("inf"):
        raise CetaneError(
            f"{name}: holds NaN or infinity", "the checkpoint is damaged: get it again"
        )
    if largest > 65504:
        raise CetaneError(f"{name}: largest value {largest:.3g} is beyond fp16 (65504)")


class Part(Block):
    """A piece of a block that can be a function of its own; its parameters are the block's."""

    def __init__(
        self,
        name: str,
        whole: Block,
        modules: tuple[str, ...],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        run: Callable[[Flow], None],
    ) -> None:
        """`modules` are the paths of the block's submodules that `run` uses."""
        super().__init__(name, whole.layer, whole.prefix)
        self._whole = (whole,)  # in a tuple, so that torch does not count it as a submodule
        self.modules_used, self.reads, self.writes, self.run = modules, reads, writes, run

    def truths(self) -> dict[str, Truth]:
        return {name: t for name, t in self.root.truths().items() if name in self.writes}

    @property
    def root(self) -> Block:
        return self._whole[0]

    def weights(self) -> Iterator[tuple[str, Weight]]:
        used = tuple(f"{path}." for path in self.modules_used)
        return ((path, w) for path, w in self.root.weights() if path.startswith(used))

    def forward(self, flow: Flow, memory: Memory) -> None:
        self.run(flow)


class RoutedBlock(Block):
    """A block that sends each token to one of its experts.

    As a block it computes all of them and masks; its parts let an engine run only the chosen one:
    `router()` writes `scores (1, experts, 1, T)`, whose largest channel chooses, and every one of
    `experts()` writes what the block writes, for the tokens that chose it.
    """

    scores: ClassVar[str] = "scores"
    one_expert = True
    """Whether a token's output comes from the one expert with the largest score."""

    @abstractmethod
    def router(self) -> Part: ...

    @abstractmethod
    def experts(self) -> tuple[Part, ...]: ...


class Head(Block):
    """Final norm and some rows of the output projection, one for each of `tokens`.

    Its logits are rows `start` to `stop` of all of the head's rows.
    """

    writes = ("logits",)
    reads = ("hidden",)

    def __init__(
        self, index: int, model: "Model", start: int, stop: int, tokens: "range | Ids"
    ) -> None:
        super().__init__(f"head-{index}", len(model.layers), "")
        self.start, self.stop, self.model, self.tokens = start, stop, (model,), tokens
        self.norm = RMSNorm(model.hidden, model.eps, unit_offset=model.unit_offset)
        self.lm_head = Projection(model.hidden, stop - start, "head")

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        model = self.model[0]
        if held.kind is None:
            return Weight(model.norm, shape, held.stored, None, pick=held.pick)
        first, last = int(self.tokens[0]), int(self.tokens[-1])
        whole, rows = (model.vocab, model.hidden), (first, last + 1)
        if last - first == len(self.tokens) - 1:
            return Weight(model.output, shape, whole, held.kind, rows)
        wanted = torch.as_tensor(self.tokens) - first
        return Weight(model.output, shape, whole, held.kind, rows, lambda read: read[wanted])

    def truths(self) -> dict[str, Truth]:
        return {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        flow["logits"] = self.lm_head(self.norm(flow["hidden"]))


class Lookup(Block):
    """The embedding as a block: a gather over `token_ids (1, T)`."""

    reads = ("token_ids",)

    def __init__(self, model: "Model") -> None:
        super().__init__("embedding", 0, "")
        self.axes, self.name_of, self.factor = (
            model.axes, model.embedding.weight, model.embedding.factor,
        )  # fmt: skip
        self.rows = LookupRows(model.vocab, model.hidden)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return Weight(self.name_of, shape, held.stored, held.kind)

    def truths(self) -> dict[str, Truth]:
        return {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        rows = nn.functional.embedding(flow["token_ids"], self.rows.weight) * self.factor
        shape = self.axes.shape(rows.shape[2], rows.shape[1])
        flow["hidden"] = rows.transpose(1, 2).reshape(shape)


class LookupRows(Leaf):
    """A table of rows by token."""

    weight: Tensor

    def __init__(self, rows: int, channels: int) -> None:
        super().__init__()
        self.hold("weight", (rows, channels), kind="embedding")


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have equal shape: query heads, key/value heads and their width.

    Where all of them see only the last `window` tokens, and the first `sinks` of the sequence, no
    more need be kept.
    """

    query: int
    heads: int
    dim: int
    window: int | None = None
    sinks: int = 0


@dataclass(frozen=True)
class History:
    """The last `length` columns of a small tensor of `channels` channels."""

    channels: int
    length: int


@dataclass(frozen=True)
class StoredTable:
    """A table of the host: `(weight + bias) * scale * factor`, by canonical names."""

    weight: str
    bias: str | None = None
    scale: str | None = None
    factor: float = 1.0

    def read(self, source: Weights, start: int = 0, stop: int | None = None) -> Tensor:
        """fp32 `(V, C)`, or some rows; refuses NaN, infinity and what fp16 cannot hold."""
        stored = (
            source.read(self.weight) if stop is None else source.read_rows(self.weight, start, stop)
        )
        table = stored.float()
        if self.bias is not None:
            table += source.read(self.bias).float()
        if self.scale is not None:
            table *= source.read(self.scale).float()
        if self.factor != 1:
            table *= self.factor
        check_finite(self.weight, table)
        return table


@dataclass(frozen=True)
class TokenTable:
    """A table of the host with a row of `channels` for each of `rows` tokens."""

    rows: int
    channels: int
    table: StoredTable


@dataclass(frozen=True)
class Model:
    """A checkpoint's architecture in ANE form; blocks live on torch's meta device until loaded."""

    hidden: int
    vocab: int
    eps: float
    layers: tuple[Block, ...]
    """Blocks in order; blocks of one layer have its number."""
    embedding: StoredTable
    norm: str
    """Canonical name of the final norm."""
    output: str
    """Canonical name of the output projection; the embedding's when they are tied."""
    host: dict[str, Source]
    """What the host supplies, by the name that blocks read it under."""
    memory: dict[str, CacheGroup | History]
    rotary: dict[str, RotaryTable]
    max_context: int
    channels: dict[str, int]
    """Channels of the tensors that blocks hand on, by name; `hidden` is one."""
    shared: dict[str, str] = field(default_factory=dict)
    """Keys and values that one layer makes and others read: name of the tensor -> cache group."""
    tables: dict[str, TokenTable] = field(default_factory=dict)
    """Tables beside the embedding's, by the name that `Embedding` sources give them."""
    unit_offset: bool = False
    """The final norm's gains are stored less one."""
    softcap: float | None = None
    """Logits are c * tanh(x / c): the host's work, since it leaves the greedy choice as it is."""
    residual_scale: float | None = None
    """The hidden tensors are the Hugging Face model's times this; None where a family has no such
    option."""
    axes: Axes = field(default_factory=Axes)
    """The layout of hidden tensors."""
    tags: dict[str, str] = field(default_factory=dict)
    """What a bundle says of its architecture beside the name: which attention, which CCA."""
    bits: Bits | None = None
    """Where projections on the notch are split: by the bits of their weights."""

    def tensors(self) -> set[str]:
        """Canonical names of all tensors that the model reads."""
        tables = [self.embedding, *(table.table for table in self.tables.values())]
        names = {name for t in tables for name in (t.weight, t.bias, t.scale) if name is not None}
        blocks = (weight.name for block in self.layers for _, weight in block.weights())
        return {*names, *blocks, self.norm, self.output}

    def with_lookup(self) -> "Model":
        """The model with its embedding as the first block."""
        if self.embedding.bias is not None or self.embedding.scale is not None:
            raise CetaneError("embedding.inside: this model's embedding is more than a table")
        with torch.device("meta"):
            layers = (Lookup(self), *self.layers)
        return replace(self, layers=layers, host=self.host | {"token_ids": TokenIds()})

    def split_contracting(self, bits: Bits) -> "Model":
        """The model with its projections on the notch split; changes the blocks in place."""
        for block in self.layers:
            block.split_contracting(bits)
        return replace(self, bits=bits)

    def heads(self, slices: int, subset: Ids | None = None) -> list[Head]:
        """The output projection for all tokens, or some, in `slices` parts, cut at multiples of 32
        rows (so that palettes' groups fit) where it is large enough."""
        tokens = range(self.vocab) if subset is None else subset
        rows = len(tokens)
        if slices > rows:
            raise CetaneError(f"head.slices = {slices}: the head has only {rows} rows")
        unit = 32 if rows >= 32 * slices else 1
        cuts = [rows * i // slices // unit * unit for i in range(slices)] + [rows]
        with torch.device("meta"):
            heads = [
                Head(index, self, start, stop, tokens[start:stop])
                for index, (start, stop) in enumerate(pairwise(cuts))
            ]
        if self.bits is not None:
            for head in heads:
                head.split_contracting(self.bits)
        return heads
