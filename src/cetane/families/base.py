"""The base of every family: blocks, the tensors between them, and their weights."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.layers import Held, Leaf, Projection, RMSNorm
from cetane.families.rotary import RotaryTable
from cetane.hardware.notch import cut, on_notch
from cetane.schema.interface import Source, TokenIds

if TYPE_CHECKING:
    from cetane.schema.subset import Ids

Flow = dict[str, Tensor]
Memory = dict[str, Callable[..., Any]]
"""The memory of a block's layer, by name: `extend(k, v)` of a cache, `extend(x)` of a history,
`extend(rule)` of a matrix."""
Truth = tuple[str, int]
"""The path of a Hugging Face module, and the index of its output."""


class Weights(Protocol):
    """A source of weights: tensors by canonical name, such as a checkpoint."""

    def read(self, name: str) -> Tensor: ...
    def read_rows(self, name: str, start: int, stop: int) -> Tensor: ...


@dataclass(frozen=True)
class Exchange:
    """Projections that read some channels, and the parameters that write these channels.

    A factor that multiplies the writers and divides the readers leaves the model the same.
    """

    readers: tuple[str, ...]
    """Paths of projections in a block."""
    writers: tuple[str, ...]
    """Paths of parameters whose first axis is these channels."""
    channels: tuple[int, int, int] = (1, 1, -1)
    """The shape of the channels that are read. The middle axis is written only once, for all query
    heads of a key/value head."""


@dataclass(frozen=True)
class Spaces:
    """The channels of a block that may have another orthogonal basis, by paths of projections."""

    writers: tuple[str, ...] = ()
    """Those whose outputs are added to the residual stream, as they are or times one number. Empty
    if something else is added too, as the output of a norm."""
    readers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those that read the residual stream, by the path of the norm before them, which stores its
    gains as they are."""
    values: tuple[str, str, int] | None = None
    """The projection that makes the values of attention heads, the one that reads what attention
    makes of them, and a head's width."""


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
    pick: Callable[[Tensor], Tensor] | None = None
    """A function that makes the parameter from the tensor; None if it only copies."""
    columns: tuple[int, int] | None = None
    """The range of the last axis, after `pick`, that the parameter holds; None for all."""

    @property
    def elements(self) -> int:
        return prod(self.shape)

    def read(self, source: Weights) -> Tensor:
        """The parameter, in the checkpoint's dtype unless `pick` changes it. CetaneError for NaN or
        infinity, or another shape."""
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

    def __init__(self, name: str, layer: int, prefix: str) -> None:
        super().__init__()
        self.name, self.layer, self.prefix = name, layer, prefix

    def truths(self) -> dict[str, Truth]:
        """The truths of the tensors that this block writes: their places in the Hugging Face
        model."""
        return {"hidden": (self.prefix.removesuffix("."), 0)}

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
                for name, held in module.held.items():
                    full, stored = (
                        f"{path}.{leaf}" if path else leaf for leaf in (name, held.source or name)
                    )
                    if full in replaced:
                        continue
                    shape = tuple(module.get_parameter(name).shape)
                    yield full, replace(self.weight(stored, shape, held), columns=held.columns)
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
        return Weight(self.prefix + path, shape, held.stored, held.kind, pick=held.pick)

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
        """Read the parameters, in fp32."""
        self.to_empty(device="cpu")
        for path, weight in (*self.weights(), *self.adapter_weights()):
            self.get_parameter(path).data.copy_(weight.read(source))

    @abstractmethod
    def forward(self, flow: Flow, memory: Memory) -> None: ...


def check_finite(name: str, tensor: Tensor) -> None:
    """Raise CetaneError for weights that are not real numbers, not finite, or beyond fp16."""
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        raise CetaneError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}, not weights")
    if not tensor.numel():
        return
    low, high = torch.aminmax(tensor)  # NaN if any is
    largest = float(torch.maximum(low.abs(), high.abs()))
    if largest != largest or largest == float("inf"):
        raise CetaneError(
            f"{name} holds NaN or infinity", "the checkpoint is damaged: download it again"
        )
    if largest > 65504:
        raise CetaneError(f"{name}: its largest value, {largest:.3g}, is beyond fp16 (65504)")


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
    adds: ClassVar[bool] = False
    chosen = 1
    """The number of experts of a token."""
    together = 1
    """The number of experts in each part, but for the last."""
    routable = True
    """Whether a token needs only the experts that it chooses."""

    @abstractmethod
    def router(self) -> Part: ...

    @abstractmethod
    def experts(self) -> tuple[Part, ...]: ...


class Head(Block):
    """A slice of the head: the final norm, and a row of the output projection for each of `tokens`.

    Its logits are rows `start` to `stop` of the whole head.
    """

    writes = ("logits",)
    reads = ("hidden",)

    def __init__(
        self, index: int, model: Model, start: int, stop: int, tokens: range | Ids
    ) -> None:
        super().__init__(f"head-{index}", len(model.layers), "")
        self.start, self.stop, self.model, self.tokens = start, stop, (model,), tokens
        self.norm = RMSNorm(
            model.hidden, model.eps, unit_offset=model.unit_offset, factor=model.logit_factor
        )
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

    def __init__(self, model: Model) -> None:
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
    """A table with a row for each token."""

    weight: Tensor

    def __init__(self, rows: int, channels: int) -> None:
        super().__init__()
        self.hold("weight", (rows, channels), kind="embedding")


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have equal shape: query heads, key/value heads and their width.

    With a `window`, all these layers see only the last `window` tokens and the first `sinks` of the
    sequence, so no more must be kept.
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
class Matrix:
    """One matrix for each head, `keys` by `groups * values`, in which a layer keeps all earlier
    tokens. Each of the groups has a decay of its own."""

    heads: int
    keys: int
    values: int
    groups: int = 1


@dataclass(frozen=True)
class StoredTable:
    """A table that the host keeps: `(weight + bias) * scale * factor`, by canonical names."""

    weight: str
    bias: str | None = None
    scale: str | None = None
    factor: float = 1.0

    def read(self, source: Weights, start: int = 0, stop: int | None = None) -> Tensor:
        """fp32 `(V, C)`, or some rows. CetaneError for NaN, infinity and values beyond fp16."""
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
    """A table that the host keeps, with a row of `channels` for each of `rows` tokens."""

    rows: int
    channels: int
    table: StoredTable


@dataclass(frozen=True)
class Model:
    """A checkpoint's architecture in ANE form. Blocks are on torch's meta device until loaded."""

    hidden: int
    vocab: int
    eps: float
    layers: tuple[Block, ...]
    """Blocks in order. The blocks of one layer all have its number."""
    embedding: StoredTable
    norm: str
    """Canonical name of the final norm."""
    output: str
    """Canonical name of the output projection: the embedding's if they are tied."""
    host: dict[str, Source]
    """The tensors that the host supplies, by the names that blocks read."""
    memory: Mapping[str, CacheGroup | History | Matrix]
    rotary: dict[str, RotaryTable]
    max_context: int
    channels: dict[str, int]
    """Channels of the tensors that blocks hand on, by name, `hidden` among them."""
    shared: dict[str, str] = field(default_factory=dict)
    """The cache groups of keys and values that one layer makes and others read, by tensor name."""
    tables: dict[str, TokenTable] = field(default_factory=dict)
    """Tables beside the embedding's, by their names in `Embedding` sources."""
    unit_offset: bool = False
    """Whether the checkpoint stores the final norm's gains less one."""
    logit_factor: float = 1.0
    """The factor on logits. The final norm's gains include it."""
    softcap: float | None = None
    """The bound c of logits, c * tanh(x / c). The host applies it: it keeps the greedy choice."""
    residual_scale: float | None = None
    """The factor from the Hugging Face model's hidden tensors to these; None if the family has no
    such option."""
    axes: Axes = field(default_factory=Axes)
    """The layout of hidden tensors."""
    bits: Bits | None = None
    """The bits of weights, by which projections on the notch are split; None to split none."""

    def tensors(self) -> set[str]:
        """Canonical names of all tensors that the model reads."""
        tables = [self.embedding, *(table.table for table in self.tables.values())]
        names = {name for t in tables for name in (t.weight, t.bias, t.scale) if name is not None}
        blocks = (weight.name for block in self.layers for _, weight in block.weights())
        return {*names, *blocks, self.norm, self.output}

    def with_lookup(self) -> Model:
        """The model with its embedding as the first block."""
        if self.embedding.bias is not None or self.embedding.scale is not None:
            raise CetaneError("embedding.inside: this model's embedding is more than a table")
        with torch.device("meta"):
            layers = (Lookup(self), *self.layers)
        return replace(self, layers=layers, host=self.host | {"token_ids": TokenIds()})

    def split_contracting(self, bits: Bits) -> Model:
        """The model with its projections on the notch split. Changes the blocks in place."""
        for block in self.layers:
            block.split_contracting(bits)
        return replace(self, bits=bits)

    def heads(self, slices: int, subset: Ids | None = None) -> list[Head]:
        """The head in `slices` slices, for all tokens or those of a subset.

        A large head is cut at multiples of 32 rows, so that groups of a palette fit.
        """
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
