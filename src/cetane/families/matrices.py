"""What layers have in common that keep all earlier tokens in a matrix: the gated delta rule and
Mamba-2.

A head keeps a matrix S. A token shrinks S by its decay, and adds the product of a key and a value,
`S += k v^T`. Its answer is `S^T q`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cetane.families.layers import Leaf, softplus
from cetane.families.model import History, Matrix
from cetane.schema.interface import MASKED


@dataclass(frozen=True)
class MatrixHeads:
    """The heads of keys (and queries), and the heads of values, which come in groups."""

    key_heads: int
    groups: int
    """Value heads for each key head."""
    keys: int
    values: int
    """The widths of a key and of a value."""

    @property
    def count(self) -> int:
        """The number of value heads."""
        return self.key_heads * self.groups

    @property
    def channels(self) -> int:
        """The channels of queries, keys and values."""
        return 2 * self.key_heads * self.keys + self.count * self.values

    def memory(self, name: str, taps: int) -> dict[str, History | Matrix]:
        """What layers keep: the matrices under a name, and what their short convolutions read."""
        made: dict[str, History | Matrix] = {
            name: Matrix(self.key_heads, self.keys, self.values, self.groups)
        }
        return made | ({"conv": History(self.channels, taps - 1)} if taps > 1 else {})


def fading(decays: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The share that is left of each token at each later one, `(heads, groups, T, T)`, and of the
    matrix at each token, `(heads, groups, T, 1)`.

    `decays (heads, groups, T, 1)` are logarithms. Each sum is a product with a constant of ones. A
    running sum would leave the ANE; in fp16, differences of running sums lose small decays after a
    large one.
    """
    if tokens == 1:
        return torch.ones(1, 1, 1, 1), decays.exp()
    up_to = torch.ones(tokens, tokens).tril()  # a token, and those before it
    sums = up_to @ (decays * up_to.tril(-1))  # of the decays after each token, in its column
    later = torch.full((tokens, tokens), MASKED).triu(1)
    return (sums + later).exp(), (up_to @ decays).exp()


class Decays(Leaf):
    """The size of a token's step, `softplus(x + dt_bias)`, and the logarithm of its decay,
    `-exp(A_log)` times that."""

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.hold_channels("A_log", heads, pick=minus_exp)
        self.hold_channels("dt_bias", heads)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        steps = self.steps(x)
        return steps, steps * self.A_log

    def steps(self, x: Tensor) -> Tensor:
        """The sizes of the steps, without bounds."""
        return softplus(x + self.dt_bias)


def minus_exp(stored: Tensor) -> Tensor:
    """-e^x, in fp32."""
    return -stored.float().exp()
