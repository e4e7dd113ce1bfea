"""Inputs and outputs of a function: where each input comes from, and where each output goes.

A family only names the tensors that its blocks read and write. The host can supply embedding rows,
rotary tables, masks, write masks and positions. Everything else comes from another shard, from a
cache or from a history. Plans and manifests know no other sources and sinks.
"""

from math import prod
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from cetane.errors import CetaneError
from cetane.validation import MOST_ELEMENTS, Data


def allocatable(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape itself. Raises CetaneError for more elements than a program may have.

    Plans are checked too, since their caches grow with the context.
    """
    if prod(shape) > MOST_ELEMENTS:
        raise CetaneError(
            f"a tensor of shape {shape} has more than {MOST_ELEMENTS:,} elements, the most of a "
            "program's",
            "more packages (--set layout.chunks=8), or a shorter --context",
        )
    return shape


Dtype = Literal["fp16", "int32", "int8"]
Order = Literal["c1t", "ct1"]
"""The order of a hidden tensor's axes: `(1, C, 1, T)` or `(1, C, T, 1)`."""
MASKED = -4e4
"""Additive mask value, finite and inside fp16: the ANE mishandles -inf (Apple's rule)."""
Shape = Annotated[tuple[Annotated[int, Field(ge=1)], ...], AfterValidator(allocatable)]


class Embedding(Data):
    """Rows of a table that the host keeps, one for each token, `(1, C, 1, T)`."""

    host: Literal["embedding"] = "embedding"
    table: str = "tokens"


class PositionRows(Data):
    """Rows of a table that the host keeps, one for each position of the call, `(1, C, 1, T)`."""

    host: Literal["position_rows"] = "position_rows"
    table: str


class TokenIds(Data):
    """The token ids, int32 `(1, T)`, for a shard that holds the embedding."""

    host: Literal["token_ids"] = "token_ids"


class Rotary(Data):
    """Cosines or sines of the call's positions, `(1, 1, D, T)`, from a named table."""

    host: Literal["rotary"] = "rotary"
    table: str
    part: Literal["cos", "sin"]


class Mask(Data):
    """Additive mask `(1, 1, T, keys)` over the keys of a cache group.

    A token sees the last `window` tokens, itself included, and the first `sinks` of the sequence.
    """

    host: Literal["mask"] = "mask"
    group: str
    window: int | None = None
    sinks: int = 0
    distances: bool = False
    """Whether a key that a token sees has the negative number of positions between the two, in
    place of 0."""


class WriteMask(Data):
    """One-hot rows `(1, 1, T, S)`: the slot of a cache group into which each token is written."""

    host: Literal["write_mask"] = "write_mask"
    group: str


class Position(Data):
    """The first slot of a cache group that this call writes, int32 `(1,)`."""

    host: Literal["position"] = "position"
    group: str


class FromTensor(Data):
    """A named tensor, written by an earlier shard."""

    host: Literal["tensor"] = "tensor"
    name: str


class FromCache(Data):
    """A buffer of a cache group; the host owns it, in the type of the inputs that read it."""

    host: Literal["cache"] = "cache"
    name: str
    group: str


class FromHistory(Data):
    """The last columns of a small tensor, kept by the host. They are zero before the first
    token."""

    host: Literal["history"] = "history"
    name: str


class FromMatrix(Data):
    """Matrices in which layers keep all earlier tokens, `(L, key heads, keys, groups * values)`. A
    key head serves `groups` value heads. The host owns the matrices, in fp32. They are zero before
    the first token."""

    host: Literal["matrix"] = "matrix"
    name: str


Source = Annotated[
    Embedding
    | PositionRows
    | TokenIds
    | Rotary
    | Mask
    | WriteMask
    | Position
    | FromTensor
    | FromCache
    | FromHistory
    | FromMatrix,
    Field(discriminator="host"),
]


class ToTensor(Data):
    """A named tensor for a later shard."""

    host: Literal["tensor"] = "tensor"
    name: str


class ToCache(Data):
    """A buffer of a cache group. `append` writes the call's columns into their slots; `replace`
    swaps the whole buffer. Columns for a buffer of int8 are whole numbers from -127 to 127."""

    host: Literal["cache"] = "cache"
    name: str
    group: str
    write: Literal["append", "replace"]


class ToLogits(Data):
    """Logits `(1, stop - start, 1, T)` of a slice of the head's rows.

    A head has a row for each token of the vocabulary, or of a subset.
    """

    host: Literal["logits"] = "logits"
    start: int
    stop: int


class ToChoice(Data):
    """The largest logit of a slice of the head's rows, `(1, T)`, or its row in the slice, `(2, T)`.

    A row is two numbers: that of its block, and its place in the block. With blocks of one row, it
    is one number, int32 `(1, T)`.
    """

    host: Literal["choice"] = "choice"
    part: Literal["row", "logit"]
    start: int
    stop: int
    block: int = Field(default=1, ge=1)
    """The rows of a block. fp16 cannot hold the number of every row, so a row is two numbers."""


class ToHistory(Data):
    """The new columns of a history. The host appends those of accepted tokens."""

    host: Literal["history"] = "history"
    name: str


class ToMatrix(Data):
    """A column for each token: its keys, its values, and the logarithms of its decays, `groups` for
    each head.

    The host folds the columns of accepted tokens into the matrices. A token shrinks a matrix by its
    decay, and then adds the outer product of its key and value.
    """

    host: Literal["matrix"] = "matrix"
    name: str
    groups: int = Field(ge=1)


Kept = ToCache | ToHistory | ToMatrix
"""Sinks that outlive a call: the host stores only the columns of accepted tokens."""
Sink = Annotated[
    ToTensor | ToCache | ToLogits | ToChoice | ToHistory | ToMatrix, Field(discriminator="host")
]


class Input(Data):
    """One input of a function. With flexible shapes, `shape` is the default shape."""

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
    """An MLState of a shard. Core ML itself keeps it between calls."""

    name: str
    shape: Shape
    dtype: Dtype = "fp16"


def choice_block(rows: int) -> int:
    """Rows of a block in which the largest logit is chosen: a power of two near the root of `rows`.

    Up to four million rows make at most 2,048 blocks of at most 2,048 rows. No whole number up to
    2,048 loses bits in fp16, and no maximum is taken over more. A block has at least two rows.
    """
    return max(2, 1 << -(-(rows - 1).bit_length() // 2))


def hidden_shape(order: Order, channels: int, tokens: int) -> tuple[int, int, int, int]:
    """The shape of a hidden tensor: `(1, C, 1, T)` for `c1t`, `(1, C, T, 1)` for `ct1`."""
    return (1, channels, 1, tokens) if order == "c1t" else (1, channels, tokens, 1)


def time_axis(order: Order) -> int:
    """The axis of a hidden tensor along which its tokens lie."""
    return 3 if order == "c1t" else 2
