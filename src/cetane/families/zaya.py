"""ZAYA1: Compressed Convolutional Attention (arXiv 2510.04476) and top-1 mixtures of experts.

The truth is transformers' `modeling_zaya.py`. A layer is two blocks, attention and experts, as in
Zyphra's own checkpoint of 80 blocks.
"""

import re
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from cetane.families.axes import Axes
from cetane.families.base import Block, Flow, Memory, Part, RoutedBlock, Truth, Weight
from cetane.families.cca import CompressedAttention, TapCounts
from cetane.families.configs import invalid, unsupported
from cetane.families.decoder import TABLE, DecoderConfig, decoder_model, heads_of
from cetane.families.kinds import LayerKind
from cetane.families.layers import Held, Leaf, Projection, RMSNorm, activation, first_largest
from cetane.families.model import Model, StoredTable
from cetane.families.rotary import rotary_table
from cetane.families.zaya_departures import DEPARTURES as DEPARTURES
from cetane.validation import Data

MODEL_TYPES = ("zaya",)


class ZayaOptions(Data):
    """The `[family]` table of a recipe."""

    skip_expert: Literal["zero", "identity"] = "zero"
    """The output for a token that chooses to skip all experts. `zero` is transformers' choice.
    `identity` is vLLM's, SGLang's and MLX's: its normed hidden state times the probability."""


Options = ZayaOptions


class ZayaConfig(DecoderConfig, Protocol):
    """The keys that are read from a transformers ZayaConfig."""

    head_dim: int
    hidden_act: str
    attention_bias: bool
    lm_head_bias: bool
    layer_types: list[str]
    sliding_window: int | None
    cca_time0: int
    """Taps of the depthwise convolution."""
    cca_time1: int
    """Taps of the convolution per head."""
    num_experts: int
    moe_intermediate_size: int
    router_hidden_size: int


class ResidualScaling(Leaf):
    """Adds a block's output to the residual stream, each through an affine map of its own."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for side in ("hidden_states", "residual"):
            self.hold_channels(f"{side}_scale", hidden)
            self.hold_channels(f"{side}_bias", hidden)

    def affine(self, x: Tensor, side: str) -> Tensor:
        """`(x + bias) * scale`, with the bias and scale of a side."""
        return (x + getattr(self, f"{side}_bias")) * getattr(self, f"{side}_scale")

    def forward(self, h: Tensor, residual: Tensor) -> Tensor:
        return self.affine(h, "hidden_states") + self.affine(residual, "residual")


class RouterMLP(nn.Module):
    """The logits of a router state, `(1, R, 1, T)` -> `(1, E + 1, 1, T)`."""

    def __init__(self, size: int, classes: int, eps: float) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps)
        self.fc1 = Projection(size, size, "router", bias=True)
        self.fc2 = Projection(size, size, "router", bias=True)
        self.out_proj = Projection(size, classes, None)  # too few rows to be worth compressing
        self.act = activation("gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.act(self.fc2(self.act(self.fc1(self.norm(x))))))


class Router(Leaf):
    """The probabilities of the experts, and of skipping them.

    It reads this layer's hidden state and the router state of the layer before (Exponential Depth
    Averaging).
    """

    router_states_scale: Tensor
    balancing_biases: Tensor

    def __init__(self, config: ZayaConfig, first: bool) -> None:
        super().__init__()
        size, classes = config.router_hidden_size, config.num_experts + 1
        self.down_proj = Projection(config.hidden_size, size, "router", bias=True)
        if not first:
            self.hold_channels("router_states_scale", size)
        self.router_mlp = RouterMLP(size, classes, config.rms_norm_eps)
        self.hold_channels("balancing_biases", classes)

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The state `(1, R, 1, T)`; probabilities, and the scores that choose, `(1, E + 1, 1,
        T)`."""
        state = self.down_proj(x)
        if before is not None:
            state = state + before * self.router_states_scale
        return state, *self.judge(self.router_mlp(state))

    def judge(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities, and the scores that choose: these include the balancing biases."""
        probabilities = torch.softmax(logits, dim=1)
        return probabilities, probabilities + self.balancing_biases


class Expert(nn.Module):
    """A gated MLP, with gates and ups in one projection."""

    def __init__(self, config: ZayaConfig) -> None:
        super().__init__()
        self.inner = config.moe_intermediate_size
        self.gate_up_proj = Projection(config.hidden_size, 2 * self.inner, "experts")
        self.down_proj = Projection(self.inner, config.hidden_size, "experts")
        self.act = activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = self.gate_up_proj(x)
        return self.down_proj(self.act(gate_up[:, : self.inner]) * gate_up[:, self.inner :])


class Experts(nn.Module):
    """All experts, each on the tokens that chose it. Other tokens are zero in its input."""

    def __init__(self, config: ZayaConfig, skip: str) -> None:
        super().__init__()
        self.count, self.skip, self.axes = config.num_experts, skip, Axes()
        self.experts = nn.ModuleList(Expert(config) for _ in range(self.count))

    def forward(self, x: Tensor, probabilities: Tensor, scores: Tensor) -> Tensor:
        chosen = first_largest(scores, self.count + 1, self.axes)
        weights = probabilities * chosen
        mixed = self.experts[0](x * chosen[:, :1])
        for index in range(1, self.count):
            mixed = mixed + self.experts[index](x * chosen[:, index : index + 1])
        mixed = mixed * weights[:, : self.count].sum(1, keepdim=True)
        return mixed + x * weights[:, self.count :] if self.skip == "identity" else mixed

    def one(self, index: int, x: Tensor, probabilities: Tensor) -> Tensor:
        """The output for tokens that chose `index`; the last index is the skip."""
        mixed = self.experts[index](x) if index < self.count else x
        return mixed * probabilities[:, index : index + 1]


class AttentionBlock(Block):
    """The first block of a layer: attention behind a norm, and its residual scaling."""

    def __init__(self, config: ZayaConfig, kind: LayerKind, index: int) -> None:
        super().__init__(f"attn-{index:02}", index, f"model.layers.{index}.")
        size, taps = config.hidden_size, TapCounts(config.cca_time0, config.cca_time1)
        self.input_layernorm = RMSNorm(size, config.rms_norm_eps)
        self.self_attn = CompressedAttention(size, kind, taps, config.attention_bias)
        self.reads, self.keeps = ("hidden", *self.self_attn.reads), self.self_attn.keeps
        self.residual = ResidualScaling(size)
        self.scaling = self.prefix + "post_attention_residual_scale."
        """The beginning of the names of the residual scaling's tensors."""

    def truths(self) -> dict[str, Truth]:
        return {"hidden": (f"{self.prefix}post_attention_residual_scale", 0)}

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        path = path.replace("self_attn.values.", "self_attn.qkv_proj.")
        path = path.replace("self_attn.convolutions.", "self_attn.qkv_proj.")
        path = re.sub(r"self_attn\.([qk]_proj)", r"self_attn.qkv_proj.\1", path)
        if path.startswith("residual."):
            return Weight(self.scaling + path.removeprefix("residual."), shape, held.stored, None)
        return super().weight(path, shape, held)

    def forward(self, flow: Flow, memory: Memory) -> None:
        h = flow["hidden"]
        mixed = self.self_attn(self.input_layernorm(h), flow, memory)
        flow["hidden"] = self.residual(mixed, h)


class ExpertsBlock(RoutedBlock):
    """The second block of a layer: router and experts behind a norm, and their residual scaling."""

    writes = ("hidden", "router")
    deciding = "gate.router_mlp.out_proj"

    def __init__(self, config: ZayaConfig, index: int, options: ZayaOptions) -> None:
        super().__init__(f"moe-{index:02}", index, f"model.layers.{index}.")
        self.reads = ("hidden",) if index == 0 else ("hidden", "router")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate = Router(config, first=index == 0)
        self.mlp = Experts(config, options.skip_expert)
        self.residual = ResidualScaling(config.hidden_size)
        self.scaling = self.prefix + "post_mlp_residual_scale."
        """The beginning of the names of the residual scaling's tensors."""

    def truths(self) -> dict[str, Truth]:
        layer = self.prefix.removesuffix(".")
        return {"hidden": (layer, 0), "router": (layer, 1)}

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        if match := re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", path):
            index = int(match[1])
            name, stored = f"{self.prefix}mlp.experts.{match[2]}", (self.mlp.count, *held.stored)
            return Weight(name, shape, stored, held.kind, (index, index + 1))
        if path.startswith("residual."):
            return Weight(self.scaling + path.removeprefix("residual."), shape, held.stored, None)
        return super().weight(path.replace("gate.", "mlp.gate."), shape, held)

    def forward(self, flow: Flow, memory: Memory) -> None:
        self.route(flow)
        h = flow["hidden"]
        x = self.post_attention_layernorm(h)
        flow["hidden"] = self.residual(self.mlp(x, flow["probabilities"], flow["scores"]), h)

    def route(self, flow: Flow) -> None:
        x = self.post_attention_layernorm(flow["hidden"])
        before = flow["router"] if "router" in self.reads else None
        flow["router"], flow["probabilities"], flow["scores"] = self.gate(x, before)

    def run_expert(self, index: int, flow: Flow) -> None:
        h = flow["hidden"]
        mixed = (
            torch.zeros_like(h)
            if self.is_nothing(index)
            else self.mlp.one(index, self.post_attention_layernorm(h), flow["probabilities"])
        )
        flow["hidden"] = self.residual(mixed, h)

    def is_nothing(self, index: int) -> bool:
        """Whether `index` is the skip, and the skip gives zero."""
        return index == self.mlp.count and self.mlp.skip == "zero"

    def router(self) -> Part:
        return Part(
            name=f"{self.name}-router",
            whole=self,
            modules=("post_attention_layernorm", "gate"),
            reads=self.reads,
            writes=("router", "probabilities", "scores"),
            run=self.route,
        )

    def experts(self) -> tuple[Part, ...]:
        return tuple(self.expert(index) for index in range(self.mlp.count + 1))

    def expert(self, index: int) -> Part:
        nothing = self.is_nothing(index)
        return Part(
            name=f"{self.name}-expert-{index:02}",
            whole=self,
            modules=(
                *(() if nothing else ("post_attention_layernorm",)),
                f"mlp.experts.{index}",
                "residual",
            ),
            reads=("hidden",) if nothing else ("hidden", "probabilities"),
            writes=("hidden",),
            run=lambda flow: self.run_expert(index, flow),
        )


SLIDING = {"hybrid": False, "hybrid_sliding": True}
"""Whether layers slide, by their type."""


def author(config: ZayaConfig, options: ZayaOptions) -> Model:
    """The model for a ZayaConfig."""
    check(config)
    heads, taps = heads_of(config), TapCounts(config.cca_time0, config.cca_time1)
    kinds = {
        name: LayerKind(
            heads,
            rotary_table(config, heads.dim, name),
            config.sliding_window if SLIDING[name] else None,
            table=name,
        )
        for name in dict.fromkeys(config.layer_types)
    }
    blocks: list[Block] = []
    with torch.device("meta"):
        for index, name in enumerate(config.layer_types):
            blocks.append(AttentionBlock(config, kinds[name], index))
            blocks.append(ExpertsBlock(config, index, options))
    classes = config.num_experts + 1
    return decoder_model(
        config,
        blocks,
        None,
        kinds.values(),
        embedding=StoredTable(
            TABLE, "model.input_hidden_states_bias", "model.input_hidden_states_scale"
        ),
        memory=taps.histories(heads),
        channels={
            "router": config.router_hidden_size,
            "scores": classes,
            "probabilities": classes,
        },
    )


def check(config: ZayaConfig) -> None:
    """Raise CetaneError for a config that is not supported or not consistent."""
    if config.lm_head_bias:
        raise unsupported("zaya", "lm_head_bias, as no released ZAYA has")
    if config.num_key_value_heads * config.head_dim % 2:
        raise invalid(
            "zaya",
            f"head_dim = {config.head_dim} gives an odd number of value channels, but half of them "
            "come from the token before",
        )
    for kind in config.layer_types:
        if kind not in SLIDING:
            raise invalid("zaya", f"layer_types: {kind!r}; known: {', '.join(SLIDING)}")
