"""The model around its blocks: the head, the embedding, the memory, and what the host supplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.axes import Axes
from cetane.families.base import Bits, Block, Flow, Memory, Truth, Weight, Weights, check_finite
from cetane.families.layers import Held, Leaf, Norm, Projection, RMSNorm
from cetane.families.rotary import RotaryTable
from cetane.schema.interface import Source, TokenIds

if TYPE_CHECKING:
    from cetane.schema.subset import Ids

Reach = tuple[int, str | None]
"""`Model.max_context`, and `Model.beyond`."""


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
    latent: bool = False
    """Whether it holds latents of tokens, in place of their keys and values."""


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
    rows: int | None = None
    """The rows of the weight, if the table has more: those are its first row. None for all."""
    first: int = 0
    """The row of the weight that is the table's first."""

    def read(self, source: Weights, start: int = 0, stop: int | None = None) -> Tensor:
        """fp32 `(V, C)`, or some rows. CetaneError for NaN, infinity and values beyond fp16."""
        end = None if stop is None else stop + self.first
        stored = self._rows(source, start + self.first, end)
        table = stored.float()
        if self.bias is not None:
            table += source.read(self.bias).float()
        if self.scale is not None:
            table *= source.read(self.scale).float()
        if self.factor != 1:
            table *= self.factor
        check_finite(self.weight, table)
        return table

    def _rows(self, source: Weights, start: int, stop: int | None) -> Tensor:
        """Some rows of the weight."""
        if stop is None:
            return source.read(self.weight)[start:]
        end = stop if self.rows is None else min(stop, self.rows)
        parts = [source.read_rows(self.weight, start, end)] if start < end else []
        if end < stop:
            first = source.read_rows(self.weight, 0, 1)
            parts.append(first.expand(stop - max(start, end), -1))
        return torch.cat(parts)


@dataclass(frozen=True)
class TokenTable:
    """A table that the host keeps, with a row of `channels` for each of `rows` tokens, or for as
    many positions."""

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
    """Canonical name of the final norm's weight; a bias has the same name but for its end."""
    output: str
    """Canonical name of the output projection: the embedding's if they are tied."""
    host: dict[str, Source]
    """The tensors that the host supplies, by the names that blocks read."""
    memory: Mapping[str, CacheGroup | History | Matrix]
    rotary: dict[str, RotaryTable]
    max_context: int
    """The positions for which a port is the model."""
    channels: dict[str, int]
    """Channels of the tensors that blocks hand on, by name, `hidden` among them."""
    shared: dict[str, str] = field(default_factory=dict)
    """The cache groups of keys and values that one layer makes and others read, by tensor name."""
    tables: dict[str, TokenTable] = field(default_factory=dict)
    """Tables beside the embedding's, by their names in `Embedding` sources."""
    final: Callable[..., Norm] = RMSNorm
    """Makes the final norm."""
    unit_offset: bool = False
    """Whether the checkpoint stores the final norm's gains less one."""
    output_bias: bool = False
    """Whether logits have biases: `lm_head.bias`."""
    logit_factor: float = 1.0
    """The factor on logits. The final norm's gains include it."""
    softcap: float | None = None
    """The bound c of logits, c * tanh(x / c). The host applies it: it keeps the greedy choice."""
    residual_scale: float | None = None
    """The factor from the Hugging Face model's hidden tensors to these; None if the family has no
    such option."""
    beyond: str | None = None
    """What the model does after `max_context` positions, and a port does not; None if it was
    trained for no more."""
    axes: Axes = field(default_factory=Axes)
    """The layout of hidden tensors."""
    bits: Bits | None = None
    """The bits of weights, by which projections on the notch are split; None to split none."""

    @property
    def ends(self) -> str:
        """Why no context is longer, as a verb: "was trained for 256 positions"."""
        if self.beyond is None:
            return f"was trained for {self.max_context} positions"
        return f"{self.beyond} after {self.max_context} positions, and a port does not"

    def tensors(self) -> set[str]:
        """Canonical names of all tensors that the model reads."""
        tables = [self.embedding, *(table.table for table in self.tables.values())]
        names = {name for t in tables for name in (t.weight, t.bias, t.scale) if name is not None}
        blocks = (*self.layers, *self.heads(1))
        return names | {weight.name for block in blocks for _, weight in block.weights()}

    def with_lookup(self, kind: str | None = "embedding") -> Model:
        """The model with its embedding as the first block. The table is a weight of this `kind`;
        with None, it stays in fp16. CetaneError for an embedding with a bias or a scale."""
        if self.embedding.bias is not None or self.embedding.scale is not None:
            raise CetaneError("embedding.inside: this model's embedding is more than a table")
        with torch.device("meta"):
            layers = (Lookup(self, kind), *self.layers)
        return replace(self, layers=layers, host=self.host | {"token_ids": TokenIds()})

    def split_contracting(self, bits: Bits) -> Model:
        """The model with its projections on the notch split. Changes the blocks in place."""
        for block in self.layers:
            block.split_contracting(bits)
        return replace(self, bits=bits)

    def heads(self, slices: int, subset: Ids | None = None) -> list[Head]:
        """The head in `slices` slices, for all tokens or those of a subset.

        A large head is cut at multiples of 32 rows, so that groups of a palette fit. CetaneError
        for more slices than rows.
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
        self.norm = model.final(
            model.hidden, model.eps, unit_offset=model.unit_offset, factor=model.logit_factor
        )
        self.lm_head = Projection(model.hidden, stop - start, "head", model.output_bias)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        model, leaf = self.model[0], path.rpartition(".")[2]
        if path.startswith("norm."):
            name = f"{model.norm.removesuffix('weight')}{leaf}"
            pick, factor = held.pick, held.factor
            return Weight(name, shape, held.stored, None, pick=pick, factor=factor)
        name = model.output if leaf == "weight" else "lm_head.bias"
        first, last = int(self.tokens[0]), int(self.tokens[-1])
        whole, rows = (model.vocab, *held.stored[1:]), (first, last + 1)
        if last - first == len(self.tokens) - 1:
            return Weight(name, shape, whole, held.kind, rows)
        wanted = torch.as_tensor(self.tokens) - first
        return Weight(name, shape, whole, held.kind, rows, lambda read: read[wanted])

    def truths(self) -> dict[str, Truth]:
        return {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        flow["logits"] = self.lm_head(self.norm(flow["hidden"]))


class Lookup(Block):
    """The embedding as a block: a gather over `token_ids (1, T)`."""

    reads = ("token_ids",)

    def __init__(self, model: Model, kind: str | None) -> None:
        super().__init__("embedding", 0, "")
        self.axes, self.name_of, self.factor = (
            model.axes, model.embedding.weight, model.embedding.factor,
        )  # fmt: skip
        self.rows = LookupRows(model.vocab, model.hidden, kind)

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

    def __init__(self, rows: int, channels: int, kind: str | None) -> None:
        super().__init__()
        self.hold("weight", (rows, channels), kind=kind)


Departure = Callable[[Model, Weights], Model]
"""A function that makes a model differ from its architecture on purpose. It may change blocks."""
