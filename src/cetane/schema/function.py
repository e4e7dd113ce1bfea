"""The programs of a bundle, and the calls of them that make up a mode."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from cetane.schema.interface import Input, Output, State
from cetane.validation import PLAIN_NAME, Data

Name = Annotated[str, StringConstraints(pattern=PLAIN_NAME)]
"""Of a shard or a function: folders and files are named so."""


class Function(Data):
    """One static graph of a shard, or with flexible shapes the one graph, at its default."""

    name: Name
    owner: str
    """Functions of one owner share its states."""
    tokens: int = Field(ge=1)
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    states: tuple[State, ...] = ()


class ShardPlan(Data):
    """One `.mlpackage`."""

    name: Name
    kind: Literal["layers", "head", "model"]
    blocks: tuple[str, ...]
    weight_bytes: int
    functions: tuple[Function, ...]


class Step(Data):
    """One call: a function of a shard."""

    shard: str
    function: str


class Route(Data):
    """One expert for each token: the largest channel of the tensor `scores` chooses it.

    `experts` are function names of the shard by expert, each expert's in ascending width. Their
    inputs and outputs are named tensors, of which they get and make the columns of their tokens.
    """

    shard: str
    scores: str
    experts: tuple[tuple[str, ...], ...] = Field(min_length=1)


class ModePlan(Data):
    """How many tokens a mode takes at a time, and its calls in order."""

    tokens: int = Field(ge=1)
    steps: tuple[Step | Route, ...]
    silent: tuple[Step | Route, ...]
    """The calls of prompt tokens whose logits are not wanted: they fill caches and histories."""


class TablePlan(Data):
    """A table of the host, with a row for each token."""

    rows: int = Field(ge=1)
    channels: int = Field(ge=1)
