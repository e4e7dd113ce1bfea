"""Gemma 3n, the text part (E2B, E4B).

Every layer has an embedding of its own, and the last layers read the caches of earlier ones
(`gemma.py`). The truth is transformers' `modeling_gemma3n.py`:

- The residual stream is several streams (AltUp). A layer predicts all of them, computes the active
  one, and corrects all by what it was wrong. `hidden` is the first stream.
- A low-rank map adds to what attention reads (Laurel), beside attention.
- In some layers, only a gate's largest channels open: those that lie above the mean by a number of
  deviations. A Gaussian has as few above it as the config asks for.
- Scores are not scaled, and values are normed without gains.
- Tokens that the second embedding lacks read its first row.
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cetane.families.base import Block, Flow, Memory, Truth
from cetane.families.configs import invalid
from cetane.families.decoder import Norms, heads_of
from cetane.families.gemma import (
    GemmaOptions,
    PerLayerInputs,
    Sharing,
    SharingConfig,
    SharingLayer,
    check_sharing,
    make_kind,
    sharing_model,
)
from cetane.families.grouped_query import at_least
from cetane.families.kinds import FULL, KINDS, LayerKind, kind_names
from cetane.families.layers import Leaf, Projection, RMSNorm
from cetane.families.model import Model

Options = GemmaOptions
MODEL_TYPES = ("gemma3n_text",)
HALF = 2**-0.5
"""The factor on the sum of what attention and Laurel give. Its square is a half."""
NORMAL = torch.distributions.Normal(0.0, 1.0)
"""In fp32, as transformers has it: where few channels open, its rounding counts."""
LEAST_SQUARE = 1e-5
"""The least mean square by which transformers divides a stream."""
LEAST = 2.0**-14
"""The least magnitude by which a tensor is divided before it is squared: fp16's least normal
number."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class Gemma3nConfig(SharingConfig, Protocol):
    """The keys that are read from a Gemma3nTextConfig. Its `intermediate_size` is a list."""

    altup_num_inputs: int
    altup_active_idx: int
    altup_correct_scale: bool
    laurel_rank: int
    activation_sparsity_pattern: list[float]


def stream_names(config: Gemma3nConfig) -> tuple[str, ...]:
    """The names of the tensors that are the residual stream."""
    return "hidden", *(f"stream_{index}" for index in range(1, config.altup_num_inputs))


def largest(x: Tensor) -> Tensor:
    """The largest magnitude of each token's channels, or `LEAST`. Divided by it, a tensor can be
    squared in fp16."""
    return at_least(x.abs().amax(1, keepdim=True), LEAST)


def mean_square(x: Tensor) -> Tensor:
    return (x * x).mean(1, keepdim=True)


def magnitude(x: Tensor) -> Tensor:
    """The root of the mean square of each token's channels."""
    size = largest(x)
    return size * mean_square(x / size).sqrt()


def as_large(x: Tensor, wanted: Tensor, least: float) -> Tensor:
    """x with the magnitude `wanted`; one below `least` counts as `least`."""
    own = magnitude(x)
    return x * (wanted / (own + at_least(least - own, 0.0)))


def open_few(x: Tensor, act: Any, deviations: float) -> Tensor:
    """The activation of what lies above the mean of the channels by more than some deviations."""
    size = largest(x)
    part = x / size
    mean = part.mean(1, keepdim=True)
    bound = (mean + mean_square(part - mean).sqrt() * deviations) * size
    opened: Tensor = act(nn.functional.relu(x - bound))
    return opened


class AltUp(Leaf):
    """Several streams, of which a layer computes one."""

    correct_output_scale: Tensor

    def __init__(self, config: Gemma3nConfig, scale: float) -> None:
        super().__init__()
        self.size, count = config.hidden_size, config.altup_num_inputs
        self.active, self.scaled = config.altup_active_idx, config.altup_correct_scale
        self.router_norm = Norms(config, scale)()
        self.modality_router = Projection(self.size, count, None)
        self.prediction_coefs = Projection(count, count**2, None)
        self.correction_coefs = Projection(count, count, None)
        if self.scaled:
            self.hold_channels("correct_output_scale", self.size)

    def modalities(self, x: Tensor) -> Tensor:
        """What a stream says of the token, `(1, streams, 1, T)`."""
        return torch.tanh(self.modality_router(self.router_norm(x)) * self.size**-1)

    def predict(self, streams: list[Tensor]) -> list[Tensor]:
        """The streams behind the layer, as those before it tell them."""
        shares = self.prediction_coefs(self.modalities(streams[self.active])).split(1, 1)
        predicted, count = [], len(streams)
        for index, stream in enumerate(streams):
            for share, other in zip(shares[index * count :], streams, strict=False):
                stream = stream + share * other
            predicted.append(stream)
        return predicted

    def correct(self, predicted: list[Tensor], computed: Tensor) -> list[Tensor]:
        """The streams, by what the active one is."""
        wrong = computed - predicted[self.active]
        shares = (self.correction_coefs(self.modalities(computed)) + 1).split(1, 1)
        return [stream + wrong * share for stream, share in zip(predicted, shares, strict=True)]

    def asked(self, streams: list[Tensor]) -> Tensor:
        """The active stream, as the layer's own input is chosen by it."""
        active = streams[self.active]
        return active * self.correct_output_scale if self.scaled else active


class Laurel(nn.Module):
    """The input and a low-rank map of it, `factor` times."""

    def __init__(self, config: Gemma3nConfig, factor: float) -> None:
        super().__init__()
        size, self.factor = config.hidden_size, factor
        self.linear_left = Projection(size, config.laurel_rank, "mlp")
        self.linear_right = Projection(config.laurel_rank, size, "mlp")
        self.post_laurel_norm = RMSNorm(size, config.rms_norm_eps, factor=factor)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return x * self.factor + mapped


class Gemma3nLayer(SharingLayer):
    """A layer of Gemma 3n."""

    def __init__(
        self,
        config: Gemma3nConfig,
        index: int,
        kind: LayerKind,
        mode: Sharing | None,
        scale: float,
    ) -> None:
        widths: Any = config.intermediate_size
        super().__init__(config, index, kind, mode, widths[index], scale)
        sparsity = config.activation_sparsity_pattern[index]
        if sparsity > 0:
            deviations = NORMAL.icdf(torch.tensor(sparsity, device="cpu")).item()
            mlp = self.part("mlp")
            mlp.act = partial(open_few, act=mlp.act, deviations=deviations)
        self.altup, self.laurel = AltUp(config, scale), Laurel(config, scale * HALF)
        self.streams = stream_names(config)
        self.reads = (*self.reads, *self.streams[1:])
        self.writes = (*self.writes, *self.streams[1:])

    def truths(self) -> dict[str, Truth]:
        """transformers' layers give all streams at once."""
        path = self.prefix.removesuffix(".")
        return {name: (path, index) for index, name in enumerate(self.streams)}

    def forward(self, flow: Flow, memory: Memory) -> None:
        predicted = self.altup.predict([flow[name] for name in self.streams])
        active = predicted[self.altup.active]
        part, names = self.part, self.names
        x = part(names.norm)(active)
        attended = part(names.after)(part(names.mixer)(x, flow, memory))
        h = (active + attended) * HALF + self.laurel(x)
        h = h + part(names.mlp_after)(part(names.mlp)(part(names.mlp_norm)(h)))
        first, *others = self.altup.correct(predicted, h)
        added = self.own_input(self.altup.asked([first, *others]), flow)
        flow.update(zip(self.streams, [first, *(one + added for one in others)], strict=True))


class Streams(Block):
    """The block that makes all streams of the first one, each as large as that."""

    reads = ("hidden",)

    def __init__(self, config: Gemma3nConfig, scale: float) -> None:
        super().__init__("streams", 0, "model.")
        size, self.least = config.hidden_size, scale * LEAST_SQUARE**0.5
        self.writes = stream_names(config)[1:]
        self.altup_projections = projections(size, len(self.writes))

    def truths(self) -> dict[str, Truth]:
        return {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        first = flow["hidden"]
        wanted = magnitude(first)
        for name, projection in zip(self.writes, self.altup_projections, strict=True):
            flow[name] = as_large(projection(first), wanted, self.least)


class Merge(Block):
    """The block that makes one stream of all: their mean, each as large as the first."""

    def __init__(self, config: Gemma3nConfig, scale: float) -> None:
        super().__init__("merge", config.num_hidden_layers - 1, "model.")
        size, self.least = config.hidden_size, scale * LEAST_SQUARE**0.5
        self.reads = stream_names(config)
        self.altup_unembed_projections = projections(size, len(self.reads) - 1)

    def truths(self) -> dict[str, Truth]:
        return {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        first, *others = (flow[name] for name in self.reads)
        share = 1 / len(self.reads)
        wanted, mean = magnitude(first) * share, first * share
        for stream, projection in zip(others, self.altup_unembed_projections, strict=True):
            mean = mean + as_large(projection(stream), wanted, self.least)
        flow["hidden"] = mean


def projections(size: int, count: int) -> nn.ModuleList:
    return nn.ModuleList(Projection(size, size, "per_layer") for _ in range(count))


def author(config: Gemma3nConfig, options: GemmaOptions) -> Model:
    """The model of a Gemma3nTextConfig."""
    check(config)
    names, scale = kind_names(config), options.scale
    modes, kinds = check_sharing(config), {}
    for layer_type in dict.fromkeys(config.layer_types):
        block = options.full_block if layer_type == FULL else None
        heads = heads_of(config, 1.0, block=block)
        kinds[KINDS[layer_type]] = make_kind(config, config, layer_type, heads, options)
    with torch.device("meta"):
        layers: list[Block] = [PerLayerInputs(config, scale), Streams(config, scale)]
        for index, name in enumerate(names):
            layers.append(Gemma3nLayer(config, index, kinds[name], modes[index], scale))
        layers.append(Merge(config, scale))
    channels = dict.fromkeys(stream_names(config), config.hidden_size)
    return sharing_model(config, layers, scale, kinds, names, channels)


def check(config: Gemma3nConfig) -> None:
    """Raise CetaneError for numbers of streams and shares of channels that no model has."""
    kind, active, streams = config.model_type, config.altup_active_idx, config.altup_num_inputs
    if not 0 <= active < streams:
        raise invalid(kind, f"altup_active_idx = {active}, but there are {streams} streams")
    for share in config.activation_sparsity_pattern:
        if not share < 1:
            raise invalid(kind, f"activation_sparsity_pattern: {share!r} is not less than 1")
