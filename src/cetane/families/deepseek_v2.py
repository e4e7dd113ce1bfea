"""DeepSeek-V2, of which V2-Lite is a size: attention on a latent vector for each token. Behind the
first layers are experts, and some that all tokens share.

The truth is transformers' `modeling_deepseek_v2.py`.
"""

from dataclasses import replace
from math import log
from typing import Protocol

import torch

from cetane.errors import CetaneError
from cetane.families.base import Block, Weight
from cetane.families.blocks import PreNormBlock
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, Norms, decoder_model
from cetane.families.experts import (
    ExpertOptions,
    MixtureBlock,
    SharedExpert,
    expert_channels,
    mixture_of,
)
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import ALL, LayerKind
from cetane.families.latents import LatentAttention, LatentSizes
from cetane.families.layers import MLP, Held
from cetane.families.model import CacheGroup, Model
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("deepseek_v2",)

__all__ = ["MODEL_TYPES", "Options", "author"]


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


class LatentBlock(PreNormBlock):
    """A layer whose attention takes the checkpoint's tensors apart."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain, attention = super().weight(path, shape, held), self.part("self_attn")
        module, _, leaf = path.removeprefix("self_attn.").rpartition(".")
        pick = attention.picks().get(module, held.pick)
        if module not in ("to_latent", "from_latent"):
            return replace(plain, pick=pick, part=module)
        sizes = attention.sizes
        rows = attention.heads.query * (sizes.plain + sizes.values)
        name = f"{self.prefix}self_attn.kv_b_proj.{leaf}"
        return replace(plain, name=name, stored=(rows, sizes.rank), pick=pick, part=module)


def author(config: DeepseekConfig, options: ExpertOptions) -> Model:
    """The model of a DeepseekV2Config."""
    check(config)
    scale, size, act = options.scale, config.hidden_size, config.hidden_act
    sizes = LatentSizes(
        rank=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        plain=config.qk_nope_head_dim,
        values=config.v_head_dim,
        queries=config.q_lora_rank,
    )
    width, count = sizes.rank + sizes.rotary, config.num_attention_heads
    heads = AttentionHeads(count, 1, width, scores_factor(config), values=sizes.rank)
    kind, norm = LayerKind(heads, rotary_table(config, sizes.rotary)), Norms(config, scale)
    inner, together = config.moe_intermediate_size, config.n_shared_experts
    weighed = config.routed_scaling_factor
    mixture = mixture_of(config, options, config.n_routed_experts, inner, False, weighed)
    layers: list[Block] = []
    with torch.device("meta"):
        for index in range(config.num_hidden_layers):
            attention = LatentAttention(size, sizes, kind, config.attention_bias, scale)
            if index < config.first_k_dense_replace:
                mlp = MLP(size, config.intermediate_size, act, config.mlp_bias, scale)
                layers.append(LatentBlock(index, norm(), attention, norm(), mlp))
                continue
            wide, bias = inner * together, config.mlp_bias
            shared = SharedExpert(size, wide, act, scale, bias) if together else None
            layers.append(LatentBlock(index, norm(), attention))
            layers.append(
                MixtureBlock(mixture, index, norm(), shared=shared, shared_name="shared_experts")
            )
    return decoder_model(
        config,
        layers,
        scale,
        [kind],
        memory={ALL: CacheGroup(count, 1, width // 2, latent=True)},
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
        raise invalid(
            config.model_type,
            f"num_key_value_heads = {config.num_key_value_heads} differs from num_attention_heads "
            f"= {config.num_attention_heads}, but all heads share a latent",
        )
