"""The largest token of a text."""

from typing import Any

import numpy as np
import pytest

from cetane.gates.observe import Seen
from cetane.gates.probes import Probe
from cetane.gates.shipped import peak

NONE = np.zeros((0, 0))


@pytest.mark.parametrize(
    ("large", "found"),
    [
        ({(0, 12): 5.0}, 12),
        ({(0, 12): 5.0, (1, 9): -6.0}, 19 + 9),
        ({(0, 3): 9.0, (0, 12): 5.0}, 12),  # among the first of a window
    ],
)
def test_the_largest_token(large: dict[tuple[int, int], float], found: int) -> None:
    """Two windows of 20 tokens, of which they share one. Their tokens have two tensors each."""
    windows = [Probe("text from 0", (1,) * 20), Probe("text from 19", (1,) * 20)]
    seen = []
    for window in range(2):
        tensors: Any = {}
        for layer in range(2):
            rows = np.zeros((20, 4), np.float32)
            for (at, token), value in large.items():
                rows[token, 1] = value if at == window and layer == 1 else 0
            tensors["layer", layer] = np.arange(20), rows
        seen.append(Seen(NONE, NONE, tensors))
    assert peak(windows, seen) == found


def test_a_port_of_one_shard() -> None:
    assert peak([Probe("text from 0", (1,) * 20)], [Seen(NONE, NONE, {})]) == 0
