"""Qwen3-Next and Qwen3.5, the text part: three layers of the gated delta rule for each that
attends, with gates on what both give. Behind them an MLP, or experts and one that all tokens share.

The truth is transformers' `modeling_qwen3_next.py`, `modeling_qwen3_5.py` and
`modeling_qwen3_5_moe.py`. Checkpoints store gains less one, but for the delta rule's norm.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.base import (
    Block,
    CacheGroup,
    Flow,
    History,
    Matrix,
    Memory,
    Model,
    Truth,
    Weight,
)
from cetane.families.decoder import TURNS, DecoderConfig, decoder_model
from cetane.families.delta import DeltaHeads, DeltaNet
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    SharedExpert,
    expert_channels,
    is_dense,
)
from cetane.families.layers import (
    MLP,
    AttentionHeads,
    Held,
    Projection,
    RMSNorm,
    attend,
    rotate,
)
from cetane.families.options import residual_eps
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Mask

Options = ExpertOptions
MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")

__all__ = ["MODEL_TYPES", "Options", "author"]


class Qwen3NextConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    head_dim: int
    hidden_act: str
    attention_bias: bool
    layer_types: list[str]
    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    """Qwen3.5 without experts has none of these four."""
    norm_topk_prob: bool
    mlp_only_layers: list[int]
    decoder_sparse_step: int
    """Only Qwen3-Next has the last three."""


class GatedAttention(nn.Module):
    """Attention with normed queries and keys, and a gate. `factor` multiplies its output."""

    def __init__(
        self, config: Qwen3NextConfig, heads: AttentionHeads, rotated: int, factor: float
    ) -> None:
        super().__init__()
        self.heads, self.rotated = heads, rotated
        size, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        inner, shared = heads.query * heads.dim, heads.kv * heads.dim
        self.q_proj = Projection(size, inner, "attention", bias)
        self.gate_proj = Projection(size, inner, "attention", bias)
        self.k_proj = Projection(size, shared, "attention", bias)
        self.v_proj = Projection(size, shared, "attention", bias)
        self.o_proj = Projection(inner, size, "attention", bias, factor)
        self.q_norm = RMSNorm(heads.dim, eps, axis=2, unit_offset=True)
        self.k_norm = RMSNorm(heads.dim, eps, axis=2, unit_offset=True)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, memory: Memory) -> Tensor:
        heads = self.heads
        q = self.q_norm(heads.split(self.q_proj(x), heads.query))
        k = self.k_norm(heads.split(self.k_proj(x), heads.kv))
        v = heads.split(self.v_proj(x), heads.kv)
        keys, values = memory["kv"](rotate(k, cos, sin, self.rotated), v)
        mixed = attend(rotate(q, cos, sin, self.rotated), keys, values, mask, heads)
        return self.o_proj(heads.merge(mixed) * torch.sigmoid(self.gate_proj(x)))


Together = tuple[str, int, tuple[int, ...], tuple[int, ...]]
"""Of a projection that is stored with others: their name, the heads whose rows lie together, the
rows of each part, and the parts that are this projection."""


def stored_together(
    model_type: str, delta: DeltaHeads, heads: AttentionHeads
) -> dict[str, Together]:
    """The projections that are stored with others. Qwen3.5 keeps those of the delta rule apart."""
    halves = heads.dim, heads.dim
    attention: dict[str, Together] = {
        "self_attn.q_proj": ("self_attn.q_proj", heads.query, halves, (0,)),
        "self_attn.gate_proj": ("self_attn.q_proj", heads.query, halves, (1,)),
    }
    if model_type != "qwen3_next":
        return attention
    values = delta.groups * delta.values
    qkvz = "linear_attn.in_proj_qkvz", delta.heads, (delta.keys, delta.keys, values, values)
    ba = "linear_attn.in_proj_ba", delta.heads, (delta.groups, delta.groups)
    return attention | {
        "linear_attn.in_proj_qkv": (*qkvz, (0, 1, 2)),
        "linear_attn.in_proj_z": (*qkvz, (3,)),
        "linear_attn.in_proj_b": (*ba, (0,)),
        "linear_attn.in_proj_a": (*ba, (1,)),
    }


def parts_of(heads: int, sizes: tuple[int, ...], wanted: tuple[int, ...], stored: Tensor) -> Tensor:
    """Some parts of the rows of every head, part by part: `(heads * sum(sizes), ...)`."""
    parts = stored.unflatten(0, (heads, sum(sizes))).split(sizes, dim=1)
    return torch.cat([parts[number].flatten(0, 1) for number in wanted])


class MixBlock(Block):
    """The delta rule or attention, normed before. The residual stream is `scale` times the
    model's."""

    def __init__(
        self,
        config: Qwen3NextConfig,
        index: int,
        delta: DeltaHeads,
        heads: AttentionHeads,
        rotated: int,
        scale: float,
        inner: int = 0,
    ) -> None:
        """With `inner` channels, an MLP follows; else experts do, in a block of their own."""
        name = f"{'layer' if inner else 'mix'}-{index:02}"
        super().__init__(name, index, f"model.layers.{index}.")
        size, eps = config.hidden_size, residual_eps(config.rms_norm_eps, scale)
        self.together = stored_together(config.model_type, delta, heads)
        self.attends = config.layer_types[index] == "full_attention"
        self.input_layernorm = RMSNorm(size, eps, unit_offset=True)
        if self.attends:
            self.reads, self.keeps = ("hidden", "rope_cos", "rope_sin", "mask"), ("kv",)
            self.self_attn = GatedAttention(config, heads, rotated, scale)
        else:
            self.reads = ("hidden",)
            self.keeps = (*(("conv",) if config.linear_conv_kernel_dim > 1 else ()), "delta")
            self.linear_attn = DeltaNet(
                config.hidden_size, delta, config.linear_conv_kernel_dim, config.rms_norm_eps, scale
            )
        self.mlp: MLP | None = None
        if inner:
            self.post_attention_layernorm = RMSNorm(size, eps, unit_offset=True)
            self.mlp = MLP(size, inner, config.hidden_act, factor=scale)

    def truths(self) -> dict[str, Truth]:
        return super().truths() if self.mlp is not None else {}

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path.replace(".decays.", "."), shape, held)
        module, _, last = path.rpartition(".")
        if module not in self.together:
            return plain
        name, heads, sizes, wanted = self.together[module]
        return replace(
            plain,
            name=f"{self.prefix}{name}.{last}",
            stored=(heads * sum(sizes), *held.stored[1:]),
            pick=partial(parts_of, heads, sizes, wanted),
        )

    def forward(self, flow: Flow, memory: Memory) -> None:
        h, *host = (flow[name] for name in self.reads)
        x = self.input_layernorm(h)
        mix = partial(self.self_attn, x, *host) if self.attends else partial(self.linear_attn, x)
        h = h + mix(memory)
        if self.mlp is not None:
            h = h + self.mlp(self.post_attention_layernorm(h))
        flow["hidden"] = h


def author(config: Qwen3NextConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    scale, dim, size = options.scale, config.head_dim, config.hidden_size
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, dim, dim**-0.5)
    key_heads = config.linear_num_key_heads
    delta = DeltaHeads(
        key_heads,
        config.linear_num_value_heads // key_heads,
        config.linear_key_head_dim,
        config.linear_value_head_dim,
    )
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    rotary = rotary_table(config, dim, part=part)
    eps = residual_eps(config.rms_norm_eps, scale)
    mixture = mixture_of(config, options)
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(len(config.layer_types)):
            mix = partial(MixBlock, config, index, delta, heads, rotary.width, scale)
            listed = config.model_type == "qwen3_next"  # Qwen3.5 has experts in all layers or none
            if mixture is None or (listed and is_dense(config, index)):
                layers.append(mix(config.intermediate_size))
                continue
            inner = config.shared_expert_intermediate_size
            shared = SharedExpert(size, inner, config.hidden_act, scale, gated=True)
            layers.append(mix())
            layers.append(MixtureBlock(mixture, index, eps, shared=shared, unit_offset=True))
    memory: dict[str, CacheGroup | History | Matrix] = {}
    if "full_attention" in config.layer_types:
        memory["kv"] = CacheGroup(heads.query, heads.kv, dim)
    if "linear_attention" in config.layer_types:
        memory["delta"] = Matrix(delta.heads, delta.keys, delta.values, delta.groups)
        if config.linear_conv_kernel_dim > 1:
            memory["conv"] = History(delta.channels, config.linear_conv_kernel_dim - 1)
    return decoder_model(
        config,
        layers,
        scale,
        host={**TURNS, "mask": Mask(group="kv")},
        memory=memory,
        rotary={"default": rotary},
        channels={} if mixture is None else expert_channels(mixture),
        unit_offset=True,
    )


def mixture_of(config: Qwen3NextConfig, options: ExpertOptions) -> Mixture | None:
    """The experts of layers that have some; None if no layer has."""
    if config.model_type == "qwen3_5_text" or not config.num_experts:
        return None
    return Mixture(
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        count=config.num_experts,
        chosen=config.num_experts_per_tok,
        normalised=getattr(config, "norm_topk_prob", True),
        act=config.hidden_act,
        together=options.together,
        factor=options.scale,
    )


def check(config: Qwen3NextConfig) -> None:
    """Raise CetaneError for a config that is not consistent."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    if values % keys:
        raise CetaneError(
            f"config.json is not valid: linear_num_value_heads = {values} is not a multiple of "
            f"linear_num_key_heads = {keys}"
        )
    for kind in config.layer_types:
        if kind not in ("linear_attention", "full_attention"):
            raise CetaneError(f"layer_types: {kind!r} is neither linear nor full attention")
