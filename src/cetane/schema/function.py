"""Shards, their functions, and the calls that make up a mode."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from cetane.schema.interface import Input, Output, State
from cetane.schema.recipe import Mode
from cetane.schema.slots import Slots
from cetane.validation import ADAPTER_NAME, PLAIN_NAME, Data

Name = Annotated[str, StringConstraints(pattern=PLAIN_NAME)]
"""Name of a shard or a function. It also names folders and files."""


AdapterName = Annotated[str, StringConstraints(pattern=ADAPTER_NAME)]


class Function(Data):
    """One static graph of a shard. With flexible shapes: its only graph, at the default shape."""

    name: Name
    owner: str
    """Functions of one owner share its states."""
    tokens: int = Field(ge=1)
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    states: tuple[State, ...] = ()
    adapter: AdapterName | None = Field(default=None, exclude_if=lambda adapter: adapter is None)
    """The adapter that it includes; None for a function of the base alone."""
    capacity: int | None = Field(default=None, ge=1, exclude_if=lambda capacity: capacity is None)
    """The smaller capacity that it was made for; None for the context, and for a function that
    serves every capacity."""

    def at(self, capacity: int) -> "Function":
        """The same function, made for a smaller capacity."""
        return self.model_copy(
            update={"name": at_capacity(self.name, capacity), "capacity": capacity}
        )

    def including(self, adapter: str) -> "Function":
        """The same function with an adapter."""
        return self.model_copy(
            update={"name": with_adapter(self.name, adapter), "adapter": adapter}
        )


def with_adapter(function: str, adapter: str) -> str:
    """The name of a function that includes an adapter, by the base's name."""
    return f"{function}-{adapter}"


def at_capacity(function: str, capacity: int) -> str:
    """The name of a function for a smaller capacity, by its name at the context."""
    return f"{function}-c{capacity}"


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
    """Experts for each token: the largest channel of the tensor `scores` chooses one.

    `experts` has the names of each expert's functions, in ascending width. Their inputs and
    outputs are named tensors: an expert reads and writes only the columns of its own tokens.
    """

    shard: str
    scores: str
    experts: tuple[tuple[str, ...], ...] = Field(min_length=1)
    adds: bool = Field(default=False, exclude_if=lambda adds: not adds)
    """Whether all channels that are not zero choose. The outputs of the chosen experts are then
    added to the tensors that they write."""
    together: int = Field(default=1, ge=1, le=2**16, exclude_if=lambda count: count == 1)
    """The number of experts, and so of channels, that one function holds; the last may hold
    fewer."""


class ModePlan(Data):
    """The tokens per call of a mode, and its calls in order."""

    tokens: int = Field(ge=1)
    steps: tuple[Step | Route, ...]
    silent: tuple[Step | Route, ...]
    """The calls for prompt tokens whose logits are not needed. They fill caches and histories."""


class CapacityPlan(Data):
    """One capacity of a plan: the number of tokens that its caches hold, and its calls.

    A function that no capacity changes, such as a head's, serves them all.
    """

    tokens: int = Field(ge=1)
    caches: dict[str, Slots]
    """Slots of every cache group. A window has the same slots at every capacity."""
    modes: dict[Mode, ModePlan]
    adapters: dict[AdapterName, dict[Mode, ModePlan]] = Field(
        default_factory=dict, exclude_if=lambda adapters: not adapters
    )
    """The calls of every mode with an adapter, by its name."""


class AdapterPlan(Data):
    """An adapter beside the base: its functions share the base's weights.

    A shard that it does not change has no function of its own for it.
    """

    rank: int = Field(ge=0)
    """The largest rank of its changes."""
    dora: bool
    """Whether it scales outputs too (DoRA)."""
    stated_base: str | None
    """The base that its config names; nobody checks this name."""
    weight_bytes: int
    """Bytes of what it adds."""
    modes: dict[Mode, ModePlan]
    """The calls of every mode with this adapter."""


class TablePlan(Data):
    """A table that the host keeps, with a row for each token."""

    rows: int = Field(ge=1)
    channels: int = Field(ge=1)
