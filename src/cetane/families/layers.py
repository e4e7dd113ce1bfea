"""The modules that all families use: a transformer's few primitives in ANE form.

Hidden tensors are `(1, C, 1, T)` here; `axes.py` has the other layout, and `grouped_query.py`
attention to keys and values.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cetane.families.axes import Axes

if TYPE_CHECKING:
    from cetane.families.adapters import ProjectionAdapter


@torch.library.custom_op("cetane::layer_norm", mutates_args=())
def layer_norm(x: Tensor, axis: int, eps: float) -> Tensor:
    """Normalise `x` over any one axis. Core ML's `layer_norm` takes any axis, torch's does not.

    It is a custom op: tracing keeps it whole, and lowering emits one fused Core ML op.
    """
    mean = x.mean(axis, keepdim=True)
    variance = (x - mean).square().mean(axis, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + eps)


@layer_norm.register_fake
def _(x: Tensor, axis: int, eps: float) -> Tensor:
    return torch.empty_like(x)


Pick = Callable[[Tensor], Tensor]
"""A function that makes a parameter from the checkpoint's tensor."""


@dataclass(frozen=True)
class RowPick:
    """A `Pick` that only takes rows of a matrix, in an order of its own."""

    function: Pick
    transposed: bool = False
    """Whether the checkpoint stores the matrix as `(I, O)`."""

    def __call__(self, stored: Tensor) -> Tensor:
        return self.function(self.upright(stored))

    def upright(self, stored: Tensor) -> Tensor:
        """The matrix with its outputs as rows, a view."""
        return stored.T if self.transposed else stored

    def order(self, stored: tuple[int, ...]) -> Tensor:
        """The numbers of the rows that it takes of a tensor of this shape, int64 `(O,)`."""
        rows = stored[int(self.transposed)]
        return self.function(torch.arange(rows)[:, None])[:, 0]

    def put(self, values: Tensor, stored: Tensor) -> None:
        """Give the rows that it takes of a stored tensor other values `(O, I)`, in place."""
        self.upright(stored)[self.order(tuple(stored.shape))] = values.to(stored)


@dataclass(frozen=True)
class HeadPick:
    """A `Pick` that takes the first rows of each head of a matrix `(O, I)`, transposed."""

    heads: int
    rows: int

    def __call__(self, stored: Tensor) -> Tensor:
        return self.views(stored).flatten(0, 1)

    def views(self, stored: Tensor) -> Tensor:
        """What it takes of each head, `(heads, I, rows)`, a view."""
        return stored.unflatten(0, (self.heads, -1))[:, : self.rows].mT

    def order(self, stored: tuple[int, ...]) -> Tensor:
        """The numbers of the rows that it takes of each head, int64 `(heads, rows)`."""
        return self.views(torch.arange(stored[0])[:, None])[:, 0]

    def put(self, values: Tensor, stored: Tensor) -> None:
        """Give the rows that it takes of a stored tensor other values `(heads * I, rows)`, in
        place."""
        views = self.views(stored)
        views.copy_(values.reshape(views.shape))


@dataclass(frozen=True)
class Held:
    """A parameter of a `Leaf`: its shape in a checkpoint, and its kind for compression rules."""

    stored: tuple[int, ...]
    kind: str | None
    """`attention`, `mlp`, `head` ...; None for gains and biases, which stay in fp16."""
    pick: Pick | None = None
    """None if the parameter is a copy, or a multiple."""
    factor: float = 1.0
    """The factor on what is picked."""
    columns: tuple[int, int] | None = None
    """The range of the stored tensor along its last axis; None for all."""
    source: str | None = None
    """The checkpoint's name for it, where that is another."""


class Leaf(nn.Module):
    """A module with parameters of its own, each in the shape that the graph uses.

    Nothing is folded into a parameter on the way to Core ML. So a program's constant is the
    parameter, bit for bit, and can be exchanged for another layer's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[str, Held] = {}

    def hold(
        self,
        name: str,
        shape: tuple[int, ...],
        stored: tuple[int, ...] | None = None,
        kind: str | None = None,
        pick: Pick | None = None,
        factor: float = 1.0,
    ) -> None:
        """Register a parameter; `stored` is its shape in a checkpoint, by default the same."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))
        self.held[name] = Held(shape if stored is None else stored, kind, pick, factor)

    def hold_channels(
        self,
        name: str,
        size: int,
        axis: int = 1,
        pick: Pick | None = None,
        factor: float = 1.0,
    ) -> None:
        """Register a vector over one axis of a tensor of rank 4."""
        self.hold(name, (size,) + (1,) * (3 - axis), (size,), None, pick, factor)


class Projection(Leaf):
    """A linear layer as a 1x1 convolution, the form that every ANE compiler keeps on the ANE.

    `kind` is the weight's kind in compression rules (`attention`, `mlp`, `head`). Without a kind
    the weight stays in fp16.
    """

    weight: Tensor
    first: Tensor
    second: Tensor
    bias: Tensor | None

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kind: str | None,
        bias: bool = False,
        factor: float = 1.0,
        inverse: float = 1.0,
    ) -> None:
        """Weight and bias are `factor` times the checkpoint's. Its inputs are `inverse` times the
        model's, so the weight is divided by that."""
        super().__init__()
        self.outputs = outputs
        self.at = 0
        """The channel at which the contracted axis is cut; 0 if it is not cut."""
        self.adapters: dict[str, ProjectionAdapter] = {}
        """What adapters add to the product, by their names."""
        self.active: str | None = None
        """The adapter that the next product includes; `adapter_on` sets it."""
        matrix = (outputs, inputs)
        self.hold("weight", (*matrix, 1, 1), matrix, kind, factor=factor / inverse)
        if bias:
            self.hold("bias", (outputs,), factor=factor)
        else:
            self.bias = None

    def split(self, at: int) -> None:
        """Contract the first `at` channels and the rest apart, and add both products.

        This is for weights that an ANE streams slowly in one piece (`cetane.hardware.notch`).
        """
        whole, (outputs, inputs) = self.held.pop("weight"), self.weight.shape[:2]
        device = self.weight.device
        del self.weight
        self.at = at
        with device:
            for name, (start, stop) in (("first", (0, at)), ("second", (at, inputs))):
                self.hold(name, (outputs, stop - start, 1, 1))
                self.held[name] = replace(whole, columns=(start, stop), source="weight")

    @property
    def adapter(self) -> "ProjectionAdapter | None":
        """The active adapter, if it changes this projection."""
        return None if self.active is None else self.adapters.get(self.active)

    def adapt(self, name: str, adapter: "ProjectionAdapter") -> None:
        """Hold an adapter. Its parameters are those of the submodule `adapter_NAME`."""
        self.adapters[name] = adapter
        self.add_module(f"adapter_{name}", adapter)

    def forward(self, x: Tensor) -> Tensor:
        own = None if self.adapter is None else self.adapter.bias
        return self.contract(x, self.bias if own is None else own)

    def contract(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product with the weight, plus the given bias instead of the layer's own."""
        adapter = self.adapter
        if adapter is None:
            return self._product(x, bias)
        if adapter.factor is None:
            return adapter.add(self._product(x, bias), x)
        scaled = adapter.add(self._product(x, None), x) * adapter.factor
        return scaled if bias is None else scaled + bias.reshape(1, -1, 1, 1)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.at:
            return nn.functional.conv2d(x, self.weight, bias)
        first = nn.functional.conv2d(x[:, : self.at], self.first, bias)
        return first + nn.functional.conv2d(x[:, self.at :], self.second)


class CausalConvolution(Leaf):
    """A convolution over time with bias, `(1, C, 1, n + T)` -> `(1, C, 1, T)`.

    The kernel has `n + 1` taps. The caller puts the past columns in front.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, channels: int, taps: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        width = channels // groups
        shape = (channels, width, *Axes().kernel(taps))
        self.hold("weight", shape, (channels, width, taps), "convolution")
        self.hold("bias", (channels,))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, self.bias, groups=self.groups)


class CausalTaps(Leaf):
    """A causal convolution of every channel alone, `(1, C, 1, n + T)` -> `(1, C, 1, T)` for `n + 1`
    taps.

    Each tap is a multiplication: ANE compilers were seen to leave depthwise convolutions to the
    CPU. The published port of ZAYA multiplies as well.
    """

    bias: Tensor | None

    def __init__(self, channels: int, taps: int, bias: bool = True) -> None:
        super().__init__()
        self.time = Axes().time
        self.taps = [f"tap_{tap}" for tap in range(taps)]
        """Parameters, each a column of the checkpoint's `weight`, the oldest first."""
        for tap, name in enumerate(self.taps):
            pick = partial(one_tap, tap=tap)
            self.hold(name, (1, channels, 1, 1), (channels, 1, taps), pick=pick)
            self.held[name] = replace(self.held[name], source="weight")
        if bias:
            self.hold_channels("bias", channels)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        # Ends count from the last column, so that they are constants for flexible T as well.
        ends = [*range(1 - len(self.taps), 0), None]
        before = (slice(None),) * self.time
        first, *rest = (
            x[(*before, slice(start, end))] * getattr(self, name)
            for start, (name, end) in enumerate(zip(self.taps, ends, strict=True))
        )
        summed = first if self.bias is None else self.bias + first
        for product in rest:
            summed = summed + product
        return summed


def one_tap(kernel: Tensor, tap: int) -> Tensor:
    return kernel[..., tap]


def normalize(x: Tensor, size: int, eps: float, axis: int) -> Tensor:
    """x / rms(x) over an axis of `size`, as the LayerNorm of [x, -x].

    The mean of [x, -x] is zero, so its variance is the mean square. The square stays inside the
    fused op; outside, fp16 would overflow.
    """
    normed = layer_norm(torch.cat([x, -x], axis), axis, eps)
    return normed[(slice(None),) * axis + (slice(0, size),)]


def plus_one(stored: Tensor) -> Tensor:
    """The gains of a checkpoint that stores them less one. In fp32: bfloat16 would lose bits."""
    return stored.float() + 1


class RMSNorm(Leaf):
    """x / rms(x) * weight over `axis`.

    With `unit_offset` the checkpoint stores the weight less one. The weight is `factor` times the
    checkpoint's. A norm without weight has only the factor.
    """

    weight: Tensor | None

    def __init__(
        self,
        size: int,
        eps: float,
        axis: int = 1,
        unit_offset: bool = False,
        factor: float = 1.0,
        weight: bool = True,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.axis, self.factor = size, eps, axis, factor
        if weight:
            self.hold_channels("weight", size, axis, plus_one if unit_offset else None, factor)
        else:
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        normed = normalize(x, self.size, self.eps, self.axis)
        if self.weight is not None:
            return normed * self.weight
        return normed if self.factor == 1 else normed * self.factor


class LayerNorm(Leaf):
    """(x - mean(x)) / std(x) * weight + bias over `axis`, perhaps without bias or without both.

    With `unit_offset` the checkpoint stores the weight less one. Weight and bias are `factor` times
    the checkpoint's.

    An ANE's op of this kind was seen to make a right mean of channels that sum to 400 times the
    largest fp16. Before macOS 14 it held the variance at that number: wrong results are too large
    by just so much, within 1 % for half of the figures (smpanaro/more-ane-transformers,
    `repro_channel_layer_norm.py` and `repro_layer_norm_overflow.py`).
    """

    weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        size: int,
        eps: float,
        axis: int = 1,
        unit_offset: bool = False,
        factor: float = 1.0,
        weight: bool = True,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.axis = size, eps, axis
        if weight:
            self.hold_channels("weight", size, axis, plus_one if unit_offset else None, factor)
        else:
            self.weight = None
        if bias:
            self.hold_channels("bias", size, axis, factor=factor)
        else:
            self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = layer_norm(x, self.axis, self.eps)
        if self.weight is not None:
            normed = normed * self.weight
        return normed if self.bias is None else normed + self.bias


Norm = RMSNorm | LayerNorm
"""A norm of the residual stream."""


@dataclass(frozen=True)
class Exchange:
    """Projections that read some channels, and the parameters that write these channels.

    A factor that multiplies the writers and divides the readers leaves the model the same.
    """

    readers: tuple[str, ...]
    """Paths of projections in a block."""
    writers: tuple[str, ...]
    """Paths of parameters whose first axis is these channels."""
    channels: tuple[int, int, int] = (1, 1, -1)
    """The shape of the channels that are read: key/value heads, the query heads of each, and a
    head's channels. Writers have no middle axis: these query heads share what they read."""


GATED, UNGATED = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")
"""The usual names of an MLP's projections, with a gate and without one."""


class MLP(nn.Module):
    """A gated MLP: `down(act(gate(x)) * up(x))`, times `factor`. Without a gate,
    `down(act(up(x)))`."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        act: str | nn.Module,
        bias: bool = False,
        factor: float = 1.0,
        inverse: float = 1.0,
        names: tuple[str, ...] = GATED,
        inner_norm: tuple[str, RMSNorm] | None = None,
    ) -> None:
        """`act` is a name, or an activation with parameters. The input is `inverse` times the
        model's; `names` are the checkpoint's. `inner_norm` is a norm of the inner channels, with
        its name."""
        super().__init__()
        self.readers, self.writer = names[:-1], names[-1]
        """The projections of its input, and the one that makes its output."""
        for reader in self.readers:
            self.add_module(reader, Projection(hidden, inner, "mlp", bias, inverse=inverse))
        self.add_module(self.writer, Projection(inner, hidden, "mlp", bias, factor))
        self.act = activation(act) if isinstance(act, str) else act
        self.inner_norm = None if inner_norm is None else inner_norm[0]
        if inner_norm is not None:
            self.add_module(*inner_norm)

    def forward(self, x: Tensor) -> Tensor:
        first, *more = (self.get_submodule(name)(x) for name in self.readers)
        inner = self.act(first)
        for up in more:
            inner = inner * up
        if self.inner_norm is not None:
            inner = self.get_submodule(self.inner_norm)(inner)
        made: Tensor = self.get_submodule(self.writer)(inner)
        return made

    def exchanges(self) -> tuple[Exchange, ...]:
        """See `Block.exchanges`. Nothing passes an activation or a norm."""
        if self.inner_norm is not None:
            return ()
        return tuple(
            Exchange((self.writer,), (f"{up}.weight", f"{up}.bias")) for up in self.readers[1:]
        )


def positive(stored: Tensor) -> Tensor:
    """The positive number that a stored x stands for, log(1 + e^x), in fp32: bfloat16 is coarse."""
    return nn.functional.softplus(stored.float())


class XIELU(Leaf):
    """xIELU (arXiv 2411.13010): `a x^2 + beta x` above zero, `b (e^x - 1 - x) + beta x` below it.

    The exponent is at most `eps`, which is just below zero.
    """

    alpha_p: Tensor
    alpha_n: Tensor
    beta: Tensor
    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        one = (1, 1, 1, 1)
        self.hold("alpha_p", one, (1,), pick=positive)
        self.hold("alpha_n", one, (1,), pick=positive)
        self.hold("beta", one, ())
        self.hold("eps", one, ())

    def forward(self, x: Tensor) -> Tensor:
        above = nn.functional.relu(x)
        below = x - above
        power = torch.minimum(below, self.eps)
        # e^x - 1 as this product: in fp16, a difference has no digits left near zero.
        grown = torch.tanh(power * 0.5) * (power.exp() + 1)
        bent = (above * self.alpha_p) * above + (grown - below) * (self.alpha_n + self.beta)
        return bent + x * self.beta


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)^2."""
    positive = nn.functional.relu(x)
    return positive * positive


tanh_gelu = partial(nn.functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_new": tanh_gelu,
    "gelu_fast": tanh_gelu,
    "gelu_accurate": tanh_gelu,
    "gelu_python_tanh": tanh_gelu,
    "gelu_python": nn.functional.gelu,
    "relu": nn.functional.relu,
    "relu2": squared_relu,
    "swish": nn.functional.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function with this name in a config's `hidden_act`. ValueError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ValueError(f"hidden_act = {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def first_largest(scores: Tensor, classes: int, axes: Axes) -> Tensor:
    """1 in the largest of `classes` channels, or the first of them in a tie; 0 in the others.

    It uses neither argmax nor one-hot, which may leave the ANE. Ties do occur in fp16.
    """
    largest = ones_where(scores == scores.amax(1, keepdim=True), scores)
    return first_ones(largest.reshape(1, 1, classes, -1), classes).reshape(axes.shape(classes, -1))


def ones_where(condition: Tensor, like: Tensor) -> Tensor:
    """1 where a condition holds, else 0, in the shape and dtype of another tensor."""
    # scalars fail for flexible T
    return torch.where(condition, torch.ones_like(like), torch.zeros_like(like))


def first_ones(rows: Tensor, size: int) -> Tensor:
    """The first 1 of each column of zeros and ones, `(1, groups, size, T)`; 0 in its others."""
    earlier = torch.tril(torch.ones(size, size, dtype=rows.dtype), -1) @ rows
    return rows * (1 - earlier.clamp(0, 1))


SOFTPLUS_MOST = 10.0
"""The most that the op of `softplus` is given."""


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), by an op that is never given more than `SOFTPLUS_MOST`.

    Above 10.4 an ANE's softplus is 0 (apple/coremltools #2687): there e^x passes 2^15. softplus is
    x within 5e-5 there.
    """
    low = torch.minimum(x, torch.full((1,), SOFTPLUS_MOST, dtype=x.dtype))
    return nn.functional.softplus(low) + (x - low)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """The rotary embedding of the first `dim` channels of each attention head, in half-split pairs.

    `x (1, heads, D, T)`, `cos`, `sin (1, 1, dim, T)`.
    """
    half = dim // 2
    first, second, rest = x[:, :, :half], x[:, :, half:dim], x[:, :, dim:]
    positioned = x[:, :, :dim] * cos + torch.cat([-second, first], dim=2) * sin
    return torch.cat([positioned, rest], dim=2) if x.shape[2] > dim else positioned
