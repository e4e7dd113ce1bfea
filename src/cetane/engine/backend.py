"""What the engine asks of a backend: open a shard, call its functions."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class Program(Protocol):
    """One opened shard."""

    def make_state(self, function: str) -> Any:
        """Fresh MLStates, made by one function and shared by all of the shard."""

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """Run a function. Floating arrays are of the backend's `dtype`, in both directions."""


class Backend(Protocol):
    """A way to run shards."""

    name: str
    dtype: type[np.floating[Any]]
    """In what the engine hands over floating inputs and keeps its caches."""

    def open(self, shard: str) -> Program:
        """Load a shard of the bundle or plan that this backend was made for."""
