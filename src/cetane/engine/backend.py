"""The interface of backends: open a shard, and call its functions."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class States(Protocol):
    """The MLStates of a shard. The methods have coremltools' names."""

    def read_state(self, name: str) -> Array:
        """A copy of a state."""

    def write_state(self, name: str, value: Array) -> None:
        """Replace the values of a state."""


class OpenShard(Protocol):
    """A shard that a backend has loaded."""

    def make_state(self, function: str) -> Any:
        """New MLStates. One function makes them, and all functions of the shard share them."""

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """Run a function. Float inputs and outputs have the backend's `dtype`."""


@runtime_checkable
class NarrowerShard(OpenShard, Protocol):
    """A shard with narrower forms of some functions: the same function for fewer tokens."""

    def narrower(self, function: str) -> dict[int, str]:
        """The names of a function's narrower forms, by their number of tokens."""


class Backend(Protocol):
    """A way to run shards."""

    name: str
    dtype: type[np.floating[Any]]
    """The dtype of float inputs, and of the caches that the host keeps."""
    by_rows: bool
    """Whether the time of a call follows its number of tokens, not the width of its function."""

    def open(self, shard: str) -> OpenShard:
        """Load a shard of the bundle or plan that this backend was made for."""
