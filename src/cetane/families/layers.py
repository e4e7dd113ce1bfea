"""The modules that all families use: a transformer's few primitives in ANE form.

Hidden tensors are `(1, C, 1, T)` here; `axes.py` has the other layout.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
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
class Held:
    """A parameter of a `Leaf`: its shape in a checkpoint, and its kind for compression rules."""

    stored: tuple[int, ...]
    kind: str | None
    """`attention`, `mlp`, `head` ...; None for gains and biases, which stay in fp16."""
    pick: Pick | None = None
    """None if the parameter is a copy."""
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
    ) -> None:
        """Register a parameter; `stored` is its shape in a checkpoint, by default the same."""
        self.register_parameter(name, nn.Parameter(torch.empty(shape), requires_grad=False))
        self.held[name] = Held(stored or shape, kind, pick)

    def hold_channels(
        self,
        name: str,
        size: int,
        axis: int = 1,
        pick: Pick | None = None,
    ) -> None:
        """Register a vector over one axis of a tensor of rank 4."""
        self.hold(name, (size,) + (1,) * (3 - axis), (size,), pick=pick)


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
        self.hold(
            "weight", (outputs, inputs, 1, 1), (outputs, inputs), kind, times(factor / inverse)
        )
        if bias:
            self.hold("bias", (outputs,), pick=times(factor))
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

    def __init__(self, channels: int, taps: int, groups: int, kind: str) -> None:
        super().__init__()
        self.groups = groups
        width = channels // groups
        shape = (channels, width, *Axes().kernel(taps))
        self.hold("weight", shape, (channels, width, taps), kind)
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
        length = x.shape[self.time] - len(self.taps) + 1
        first, *rest = (
            x.narrow(self.time, start, length) * getattr(self, name)
            for start, name in enumerate(self.taps)
        )
        summed = first if self.bias is None else self.bias + first
        for product in rest:
            summed = summed + product
        return summed


def one_tap(kernel: Tensor, tap: int) -> Tensor:
    return kernel[..., tap]


@dataclass(frozen=True)
class AttentionHeads:
    """The numbers of query and key/value heads, their width, and the factor on their scores."""

    query: int
    kv: int
    dim: int
    scale: float
    block: int | None = None
    """The number of keys that attention takes at a time; None for all."""
    softcap: float | None = None
    """The bound c of scores, c * tanh(score / c); None for no bound."""
    values: int | None = None
    """The width of values; None for that of keys."""
    axes: Axes = field(default_factory=Axes)

    def split(self, x: Tensor, heads: int) -> Tensor:
        """Channels of a hidden tensor -> `(1, heads, D, T)`."""
        return x.reshape(1, heads, self.dim, -1)

    def merge(self, x: Tensor) -> Tensor:
        """`(1, H, D, T)` -> a hidden tensor."""
        return x.reshape(self.axes.shape(self.query * (self.values or self.dim), -1))

    def capped(self, scores: Tensor) -> Tensor:
        """Scores within the bound."""
        if self.softcap is None:
            return scores
        return torch.tanh(scores * (1 / self.softcap)) * self.softcap


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


def times(factor: float) -> Pick | None:
    """A function that multiplies a stored tensor; None for the factor 1."""
    return None if factor == 1 else partial(scaled, pick=None, factor=factor)


def scaled(stored: Tensor, pick: Pick | None, factor: float) -> Tensor:
    """The stored tensor, picked, times a factor, in fp32."""
    return (pick(stored) if pick else stored).float() * factor


class RMSNorm(Leaf):
    """x / rms(x) * weight over `axis`.

    With `unit_offset` the checkpoint stores the weight less one. The weight is `factor` times the
    checkpoint's.
    """

    weight: Tensor

    def __init__(
        self,
        size: int,
        eps: float,
        axis: int = 1,
        unit_offset: bool = False,
        factor: float = 1.0,
    ) -> None:
        super().__init__()
        self.size, self.eps, self.axis = size, eps, axis
        pick = plus_one if unit_offset else None
        if factor != 1:
            pick = partial(scaled, pick=pick, factor=factor)
        self.hold_channels("weight", size, axis, pick)

    def forward(self, x: Tensor) -> Tensor:
        return normalize(x, self.size, self.eps, self.axis) * self.weight


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
    """The shape of the channels that are read. The middle axis is written only once, for all query
    heads of a key/value head."""


class MLP(nn.Module):
    """A gated MLP: `down(act(gate(x)) * up(x))`, times `factor`."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        act: str,
        bias: bool = False,
        factor: float = 1.0,
        inverse: float = 1.0,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        """Its input is `inverse` times the model's; `names` are the checkpoint's."""
        super().__init__()
        self.names = names
        gate, up, down = names
        self.add_module(gate, Projection(hidden, inner, "mlp", bias, inverse=inverse))
        self.add_module(up, Projection(hidden, inner, "mlp", bias, inverse=inverse))
        self.add_module(down, Projection(inner, hidden, "mlp", bias, factor))
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        made: Tensor = down(self.act(gate(x)) * up(x))
        return made

    @property
    def readers(self) -> tuple[str, ...]:
        """The projections of its input."""
        return self.names[:2]

    @property
    def writer(self) -> str:
        """The projection that makes its output."""
        return self.names[2]

    def exchanges(self) -> tuple[Exchange, ...]:
        """See `Block.exchanges`."""
        up = self.names[1]
        return (Exchange((self.writer,), (f"{up}.weight", f"{up}.bias")),)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "swish": nn.functional.silu,
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function with this name in a config's `hidden_act`."""
    if name not in ACTIVATIONS:
        raise CetaneError(f"unknown hidden_act {name!r}; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def first_largest(scores: Tensor, classes: int, axes: Axes) -> Tensor:
    """1 in the largest of `classes` channels, or the first of them in a tie; 0 in the others.

    It uses neither argmax nor one-hot, which may leave the ANE. Ties do occur in fp16.
    """
    one, zero = (make(1, dtype=scores.dtype) for make in (torch.ones, torch.zeros))
    largest = torch.where(scores == scores.amax(1, keepdim=True), one, zero)
    rows = largest.reshape(1, 1, classes, -1)
    earlier = torch.tril(torch.ones(classes, classes, dtype=scores.dtype), -1) @ rows
    first = rows * (1 - earlier.clamp(0, 1))
    return first.reshape(axes.shape(classes, -1))


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), by an op that is never given more than 10.

    Above 10.4 an ANE's softplus is 0, since e^x is beyond fp16 (apple/coremltools #2687). There,
    softplus is x within 5e-5.
    """
    low = torch.minimum(x, torch.full((1,), 10.0, dtype=x.dtype))
    return nn.functional.softplus(low) + (x - low)


def at_least(x: Tensor, least: float) -> Tensor:
    """The larger of x and a number. torch's clamp would become a clip up to infinity."""
    return torch.maximum(x, torch.full((1,), least, dtype=x.dtype))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    """The rotary embedding of the first `dim` channels of each attention head, in half-split pairs.

    `x (1, heads, D, T)`, `cos`, `sin (1, 1, dim, T)`.
    """
    half = dim // 2
    first, second, rest = x[:, :, :half], x[:, :, half:dim], x[:, :, dim:]
    turned = x[:, :, :dim] * cos + torch.cat([-second, first], dim=2) * sin
    return torch.cat([turned, rest], dim=2) if x.shape[2] > dim else turned


@dataclass(frozen=True)
class Rounded:
    """Keys or values `(1, KV, D, S)` as whole numbers, with a scale for each token and head.

    A code counts sixteenths of its scale. So a product with codes is at most 16 times the product
    with what they stand for, and stays inside fp16.
    """

    codes: Tensor
    scales: Tensor
    """`(1, KV, 1, S)`."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def __getitem__(self, at: Any) -> "Rounded":
        """Some slots."""
        return Rounded(self.codes[at], self.scales[at])

    def widened(self) -> Tensor:
        """What the codes stand for."""
        return self.codes * (self.scales * (1 / STEPS))


STEPS = 16
"""Codes in a scale."""
LARGEST = 129 / 1024
"""The scale of a column whose largest magnitude is 1. It is exact in fp16, and so near 16 / 127
that the largest code, 127.008, rounds to 127."""
SMALLEST = 2.0**-10
"""The least scale. A step of it is the least normal number of fp16."""
Seen = Tensor | Rounded
"""Keys or values, as numbers or as whole numbers."""


def rounded(x: Tensor) -> Rounded:
    """Columns `(1, KV, D, T)` with 127 steps to the largest magnitude of each token and head."""
    scales = at_least(x.abs().amax(2, keepdim=True) * LARGEST, SMALLEST)
    return Rounded(torch.round(x / scales * STEPS), scales)


LONGEST = 8192
"""The most keys that attention takes at a time if a family names no number, beside the keys of the
call's own tokens. Apple's own attention for the ANE takes as many (coreai-models,
primitives/ios/sdpa.py)."""
MOST = 128.0
"""The largest factor of `lift`: that of the most keys."""


def attend(
    q: Tensor,
    k: Seen,
    v: Seen,
    mask: Tensor,
    heads: AttentionHeads,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention. The query heads of one KV head are rows of one matrix product.

    `q (1, H, D, T)`, `k`, `v (1, KV, D, S)`, rounded or not, additive `mask (1, 1, G*T, S)` ->
    `(1, H, D, T)`.
    `sinks (1, KV, G, 1)` are scores of one more key for each query head, whose value is zero.
    """
    kv, groups, dim = heads.kv, heads.query // heads.kv, heads.dim
    rows = q.reshape(kv, groups, dim, -1).transpose(2, 3).reshape(1, kv, -1, dim)
    scale = heads.scale / STEPS if isinstance(k, Rounded) else heads.scale
    if scale != 1:
        rows = rows * scale
    width = heads.values or dim
    keys = int(k.shape[3])  # a trace's number, so the factor of a flexible shape is a constant too
    parts = blocks(keys, int(q.shape[3]), heads.block or LONGEST)
    if sinks is None and len(parts) > 1:
        mixed = attend_in_blocks(rows, k, v, mask, heads, parts)
    else:
        factor = lift(keys)
        scores = heads.capped(scored(rows, k)) + mask
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            column = sinks.expand(1, kv, groups, q.shape[3]).reshape(1, kv, -1, 1)
            weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        lifted = weights if factor == 1 else weights * factor
        mixed = mix(lifted, v, factor)
    return mixed.reshape(kv, groups, -1, width).transpose(2, 3).reshape(1, heads.query, width, -1)


def lift(keys: int) -> float:
    """The factor on softmax's weights of some keys: a power of two, so it is exact in fp32.

    An ANE counts products below 2**-14 as zero (`mil/ane.py`). The mean weight is 1 / keys: times
    the factor it is 1/128 to 1/64, for 64 to 16,384 keys. Published for 4,096 keys: an error of
    5.3 % without a factor, of 0.06 % with 64, which is the factor here
    (llms-on-apple-neural-engine, findings/attention-product-precision). Sums stay inside fp16
    for values up to 512.
    """
    return min(2.0 ** max((keys // 64).bit_length() - 1, 0), MOST)


def scored(rows: Tensor, k: Seen) -> Tensor:
    """Queries, divided by `STEPS` for rounded keys, times keys. Scales multiply the scores."""
    return (rows @ k.codes) * k.scales if isinstance(k, Rounded) else rows @ k


def mix(weights: Tensor, v: Seen, factor: float) -> Tensor:
    """`weights (..., S)`, lifted by a factor, times values `(..., D, S)`; without the factor.

    Scales of rounded values multiply weights. They are first divided by their mean, weighted as the
    values are. So weights keep their size, and the sum is at most 127 times the factor.
    """
    if not isinstance(v, Rounded):
        mixed = weights @ v.transpose(2, 3)
        return mixed if factor == 1 else mixed * (1 / factor)
    mean = at_least((weights @ v.scales.transpose(2, 3)) * (1 / factor), SMALLEST)
    shares = weights * (v.scales / mean)
    return ((shares @ v.codes.transpose(2, 3)) * (1 / (STEPS * factor))) * mean


def blocks(keys: int, new: int, most: int) -> list[slice]:
    """Keys in blocks of `most`.

    The last `new` keys, those of the call's own tokens, join the block before them. So a cache of
    `most` slots is read whole, as a smaller one is.
    """
    starts = range(0, max(keys - new, 1), most)
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], keys], strict=True)]


def attend_in_blocks(
    rows: Tensor, k: Seen, v: Seen, mask: Tensor, heads: AttentionHeads, parts: list[slice]
) -> Tensor:
    """Attention over some keys at a time; the results of these blocks are weighted as they come.

    The published ports call it "flash decoding" (arXiv 2307.08691). Here each block is normalised
    by itself, so nothing grows with the number of keys. Masks are finite, so a block of hidden keys
    has a maximum too. Its weight vanishes beside a visible key, so 0 / 0 never arises.
    """
    before: tuple[Tensor, Tensor, Tensor] | None = None
    for part in parts:
        scores = heads.capped(scored(rows, k[..., part])) + mask[..., part]
        top = scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        factor = lift(part.stop - part.start)
        # A number over a tensor becomes Core ML's inverse, which adds 1e-4 to the tensor.
        mixed = mix(weights * factor / total, v[..., part], factor)
        if before is not None:
            highest = torch.maximum(top, before[0])
            old, new = before[1] * torch.exp(before[0] - highest), total * torch.exp(top - highest)
            top, total = highest, old + new
            mixed = before[2] * (old / total) + mixed * (new / total)
        before = top, total, mixed
    return mixed
