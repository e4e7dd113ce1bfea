"""The interface of backends: open a shard, and call its functions."""

from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class States(Protocol):
    """MLStates; the methods are coremltools'."""

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
    """A shard that has some of its functions for fewer tokens too."""

    def narrower(self, function: str) -> dict[int, str]:
        """The names of a function for fewer tokens, by their number."""


class Backend(Protocol):
    """A way to run shards."""

    name: str
    dtype: type[np.floating[Any]]
    """The dtype of float inputs, and of the caches that the host keeps."""
    by_rows: bool
    """Whether a call takes the longer the more tokens it has, whatever its width."""

    def open(self, shard: str) -> OpenShard:
        """Load a shard of the bundle or plan that this backend was made for."""
