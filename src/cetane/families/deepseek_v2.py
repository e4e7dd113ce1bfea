"""DeepSeek-V2, of which V2-Lite is a size: attention on a latent vector for each token.

The cache holds the latent and one turned key, for all heads together. Queries are taken to the
latent, and sums of latents to the heads' values, so no key or value of a head is ever made. Behind
the first layers are experts, and some that all tokens share.

The truth is transformers' `modeling_deepseek_v2.py`.
"""

from dataclasses import replace
from functools import partial
from math import log
from typing import Protocol

import torch
from torch import Tensor, nn

from cetane.errors import CetaneError
from cetane.families.base import (
    Block,
    CacheGroup,
    Flow,
    Memory,
    Model,
    Truth,
    Weight,
)
from cetane.families.decoder import TURNS, DecoderConfig, decoder_model
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    SharedExpert,
    expert_channels,
)
from cetane.families.layers import (
    MLP,
    AttentionHeads,
    Held,
    Leaf,
    Projection,
    RMSNorm,
    attend,
    rotate,
)
from cetane.families.options import residual_eps
from cetane.families.rotary import rotary_table
from cetane.schema.interface import Mask

Options = ExpertOptions
MODEL_TYPES = ("deepseek_v2",)

__all__ = ["MODEL_TYPES", "Options", "author"]

LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, whatever the config says of others."""


class DeepseekConfig(DecoderConfig, Protocol):
    """The keys that are read from a DeepseekV2Config."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    topk_method: str


def scores_factor(config: DeepseekConfig) -> float:
    """The factor on scores; long contexts have a larger one."""
    factor = float(config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    longer, share = rope.get("factor", 1.0), rope.get("mscale_all_dim", 0)
    if rope.get("rope_type", "default") != "default" and share and longer > 1:
        factor *= (0.1 * share * log(longer) + 1) ** 2
    return factor


class PerHead(Leaf):
    """A linear layer for each attention head, as a convolution in groups."""

    weight: Tensor

    def __init__(self, heads: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.heads = heads
        self.hold("weight", (heads * outputs, inputs, 1, 1), kind="attention")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, self.weight, groups=self.heads)


class LatentAttention(nn.Module):
    """`factor` multiplies its output."""

    def __init__(self, config: DeepseekConfig, heads: AttentionHeads, factor: float) -> None:
        super().__init__()
        size, bias, count = config.hidden_size, config.attention_bias, heads.query
        self.heads, self.rank, self.turned = heads, config.kv_lora_rank, config.qk_rope_head_dim
        self.plain = config.qk_nope_head_dim
        width = count * (self.plain + self.turned)
        if config.q_lora_rank is None:
            self.q_proj = Projection(size, width, "attention")
        else:
            self.q_a_proj = Projection(size, config.q_lora_rank, "attention", bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Projection(config.q_lora_rank, width, "attention")
        self.low = config.q_lora_rank is not None
        self.kv_a_proj_with_mqa = Projection(size, self.rank + self.turned, "attention", bias)
        self.kv_a_layernorm = RMSNorm(self.rank, LATENT_EPS)
        self.to_latent = PerHead(count, self.plain, self.rank)
        self.from_latent = PerHead(count, self.rank, config.v_head_dim)
        self.o_proj = Projection(count * config.v_head_dim, size, "attention", bias, factor)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, memory: Memory) -> Tensor:
        heads, count = self.heads, self.heads.query
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if self.low else self.q_proj(x)
        plain, turned = q[:, : count * self.plain], q[:, count * self.plain :]
        turned = rotate(turned.reshape(1, count, self.turned, -1), cos, sin, self.turned)
        latent = self.to_latent(plain).reshape(1, count, self.rank, -1)
        compressed = self.kv_a_proj_with_mqa(x)
        own = self.kv_a_layernorm(compressed[:, : self.rank]).reshape(1, 1, self.rank, -1)
        key = compressed[:, self.rank :].reshape(1, 1, self.turned, -1)
        own = torch.cat([own, rotate(key, cos, sin, self.turned)], dim=2)
        # The two tensors of a cache hold the two halves, so nothing is kept twice.
        half = (self.rank + self.turned) // 2
        keys = torch.cat(memory["kv"](own[:, :, :half], own[:, :, half:]), dim=2)
        asked = torch.cat([latent, turned], dim=2)
        mixed = attend(asked, keys, keys[:, :, : self.rank], mask, heads)
        return self.o_proj(self.from_latent(heads.merge(mixed)))


def to_halves(rows: Tensor) -> Tensor:
    """Rows `(..., P, C)` of turned pairs (0, 1), (2, 3) ... as two halves."""
    return rows.unflatten(-2, (-1, 2)).transpose(-2, -3).flatten(-3, -2)


def queries(heads: int, plain: int, stored: Tensor) -> Tensor:
    """The plain rows of all heads, then their turned ones."""
    rows = stored.unflatten(0, (heads, -1))
    return torch.cat([rows[:, :plain].flatten(0, 1), to_halves(rows[:, plain:]).flatten(0, 1)])


def latent_and_key(rank: int, stored: Tensor) -> Tensor:
    """The rows of the latent, then those of the turned key; of a weight or a bias."""
    rows = stored.reshape(len(stored), -1)
    return torch.cat([rows[:rank], to_halves(rows[rank:])]).reshape(stored.shape)


def towards_latent(heads: int, plain: int, stored: Tensor) -> Tensor:
    """What makes keys, transposed for each head."""
    return stored.unflatten(0, (heads, -1))[:, :plain].transpose(1, 2).flatten(0, 1)


def towards_values(heads: int, plain: int, stored: Tensor) -> Tensor:
    """What makes values."""
    return stored.unflatten(0, (heads, -1))[:, plain:].flatten(0, 1)


class DeepseekBlock(Block):
    """Attention, and in the first layers an MLP, each normed before. The residual stream is `scale`
    times the model's."""

    reads = ("hidden", "rope_cos", "rope_sin", "mask")
    keeps = ("kv",)

    def __init__(
        self, config: DeepseekConfig, heads: AttentionHeads, index: int, scale: float
    ) -> None:
        dense = index < config.first_k_dense_replace
        name = f"{'layer' if dense else 'attn'}-{index:02}"
        super().__init__(name, index, f"model.layers.{index}.")
        size, eps = config.hidden_size, residual_eps(config.rms_norm_eps, scale)
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = LatentAttention(config, heads, scale)
        self.mlp: MLP | None = None
        if dense:
            inner, bias = config.intermediate_size, config.mlp_bias
            self.post_attention_layernorm = RMSNorm(size, eps)
            self.mlp = MLP(size, inner, config.hidden_act, bias, scale)
        made = heads.query, config.qk_nope_head_dim
        rows = heads.query * (config.qk_nope_head_dim + config.v_head_dim)
        both = "self_attn.kv_b_proj", (rows, config.kv_lora_rank)
        self.picks = {
            "self_attn.q_proj": partial(queries, *made),
            "self_attn.q_b_proj": partial(queries, *made),
            "self_attn.kv_a_proj_with_mqa": partial(latent_and_key, config.kv_lora_rank),
        }
        self.halves = {
            "self_attn.to_latent": (*both, partial(towards_latent, *made)),
            "self_attn.from_latent": (*both, partial(towards_values, *made)),
        }

    def truths(self) -> dict[str, Truth]:
        return super().truths() if self.mlp is not None else {}

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        module = path.rpartition(".")[0]
        if module in self.halves:
            name, stored, pick = self.halves[module]
            return Weight(f"{self.prefix}{name}.weight", shape, stored, held.kind, pick=pick)
        plain = super().weight(path, shape, held)
        return replace(plain, pick=self.picks.get(module, held.pick))

    def forward(self, flow: Flow, memory: Memory) -> None:
        h, *host = (flow[name] for name in self.reads)
        h = h + self.self_attn(self.input_layernorm(h), *host, memory)
        if self.mlp is not None:
            h = h + self.mlp(self.post_attention_layernorm(h))
        flow["hidden"] = h


def author(config: DeepseekConfig, options: ExpertOptions) -> Model:
    """The model of a DeepseekV2Config."""
    check(config)
    scale, size = options.scale, config.hidden_size
    rank, turned = config.kv_lora_rank, config.qk_rope_head_dim
    factor = scores_factor(config)
    heads = AttentionHeads(config.num_attention_heads, 1, rank + turned, factor, values=rank)
    eps = residual_eps(config.rms_norm_eps, scale)
    inner = config.moe_intermediate_size
    mixture = Mixture(
        hidden=size,
        inner=inner,
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        normalised=False,
        act=config.hidden_act,
        together=options.together,
        factor=scale * config.routed_scaling_factor,
    )
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            layers.append(DeepseekBlock(config, heads, index, scale))
            if index >= config.first_k_dense_replace:
                width, act = inner * config.n_shared_experts, config.hidden_act
                shared = SharedExpert(size, width, act, scale, config.mlp_bias)
                layers.append(
                    MixtureBlock(mixture, index, eps, shared=shared, shared_name="shared_experts")
                )
    return decoder_model(
        config,
        layers,
        scale,
        host={**TURNS, "mask": Mask(group="kv")},
        memory={"kv": CacheGroup(heads.query, 1, (rank + turned) // 2)},
        rotary={"default": rotary_table(config, turned)},
        channels=expert_channels(mixture),
    )


def check(config: DeepseekConfig) -> None:
    """Raise CetaneError for a config that is not supported."""
    if config.topk_method != "greedy":
        raise CetaneError(f"topk_method {config.topk_method!r} is not supported; known: greedy")
    if (config.kv_lora_rank + config.qk_rope_head_dim) % 2:
        raise CetaneError(
            f"kv_lora_rank = {config.kv_lora_rank} and qk_rope_head_dim = "
            f"{config.qk_rope_head_dim}: their sum is odd, which is not supported"
        )
    if config.num_key_value_heads != config.num_attention_heads:
        raise CetaneError("config.json is not valid: all heads share one latent")
