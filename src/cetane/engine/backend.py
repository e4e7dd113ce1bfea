"""What the engine asks of a backend: open a shard, call its functions."""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Arrays = dict[str, Array]


class OpenShard(Protocol):
    """One shard that a backend has loaded."""

    def make_state(self, function: str) -> Any:
        """Fresh MLStates: one function makes them, and all functions of the shard share them."""

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        """Run a function. Floating arrays are of the backend's `dtype`, in both directions."""


class Backend(Protocol):
    """A way to run shards."""

    name: str
    dtype: type[np.floating[Any]]
    """Of floating inputs, and of the caches that the host keeps."""

    def open(self, shard: str) -> OpenShard:
        """Load a shard of the bundle or plan that this backend was made for."""
