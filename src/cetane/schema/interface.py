"""What travels into and out of a shard, by name: the closed vocabulary of plan and manifest.

A family only names what its blocks read and write. The host can supply embedding rows, rotary
tables, masks, write masks and positions; everything else comes from another shard or from a cache.
"""

from math import prod
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cetane.validation import Data


def allocatable(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Refuse a shape that no machine should be asked to allocate."""
    if prod(shape) > 2**32:
        raise ValueError(f"a tensor of shape {shape} is too large")
    return shape


Dtype = Literal["fp16", "int32"]
Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], AfterValidator(allocatable)]


class Embedding(Data):
    """Rows of a table of the host, by token, `(1, C, 1, T)`."""

    host: Literal["embedding"] = "embedding"
    table: str = "tokens"


class TokenIds(Data):
    """The tokens themselves, int32 `(1, T)`, for a shard that holds the embedding."""

    host: Literal["token_ids"] = "token_ids"


class Rotary(Data):
    """Cosines or sines of the call's positions, `(1, 1, D, T)`, from a named table."""

    host: Literal["rotary"] = "rotary"
    table: str
    part: Literal["cos", "sin"]


class Mask(Data):
    """Additive mask `(1, 1, T, keys)` over what a call sees of a cache group: the last `window`
    tokens, itself included, and the first `sinks` of the sequence."""

    host: Literal["mask"] = "mask"
    group: str
    window: int | None = None
    sinks: int = 0


class WriteMask(Data):
    """One-hot rows `(1, 1, T, S)`: the slot of a cache group that each token goes to."""

    host: Literal["write_mask"] = "write_mask"
    group: str


class Position(Data):
    """First slot that this call writes in a cache group, int32 `(1,)`."""

    host: Literal["position"] = "position"
    group: str


class FromTensor(Data):
    """A named tensor that an earlier shard wrote."""

    host: Literal["tensor"] = "tensor"
    name: str


class FromCache(Data):
    """A buffer of a cache group that the host owns."""

    host: Literal["cache"] = "cache"
    name: str
    group: str


class FromHistory(Data):
    """The last columns of a small tensor, which the host keeps: zeros before the first token."""

    host: Literal["history"] = "history"
    name: str


Source = Annotated[
    Embedding
    | TokenIds
    | Rotary
    | Mask
    | WriteMask
    | Position
    | FromTensor
    | FromCache
    | FromHistory,
    Field(discriminator="host"),
]


class ToTensor(Data):
    """A named tensor for a later shard."""

    host: Literal["tensor"] = "tensor"
    name: str


class ToCache(Data):
    """A buffer of a cache group: `append` writes the call's columns where they belong, `replace`
    swaps the buffer."""

    host: Literal["cache"] = "cache"
    name: str
    group: str
    write: Literal["append", "replace"]


class ToLogits(Data):
    """Logits `(1, stop - start, 1, T)` of a slice of the head's rows: of the vocabulary, or of the
    tokens that the head has."""

    host: Literal["logits"] = "logits"
    start: int
    stop: int


class ToChoice(Data):
    """The largest logit of a slice of the head's rows, `(1, T)`, or which of its rows that is."""

    host: Literal["choice"] = "choice"
    part: Literal["row", "logit"]
    start: int
    stop: int


class ToHistory(Data):
    """The call's own columns of a history; the host appends those of accepted tokens."""

    host: Literal["history"] = "history"
    name: str


Sink = Annotated[ToTensor | ToCache | ToLogits | ToChoice | ToHistory, Field(discriminator="host")]


class Input(Data):
    """One input of a function; with flexible shapes, `shape` is the default one."""

    name: str
    shape: Shape
    dtype: Dtype = "fp16"
    source: Source


class Output(Data):
    """One output of a function."""

    name: str
    shape: Shape
    dtype: Dtype = "fp16"
    sink: Sink


class State(Data):
    """An MLState of a shard, kept between calls by Core ML itself."""

    name: str
    shape: Shape
    dtype: Dtype = "fp16"


Order = Literal["c1t", "ct1"]


def hidden_shape(order: Order, channels: int, tokens: int) -> tuple[int, int, int, int]:
    """Shape of a hidden tensor: `(1, C, 1, T)` for `c1t`, `(1, C, T, 1)` for `ct1`."""
    return (1, channels, 1, tokens) if order == "c1t" else (1, channels, tokens, 1)


MASKED = -4e4
"""Additive mask value: finite and inside fp16 (Apple's rule; -inf is mishandled on the ANE)."""


def time_axis(order: Order) -> int:
    """The axis of a hidden tensor along which its tokens lie."""
    return 3 if order == "c1t" else 2
