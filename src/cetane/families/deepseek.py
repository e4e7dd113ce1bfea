"""DeepSeek and its relatives: attention on a latent vector for each token.

- DeepSeek-V2, of which V2-Lite is a size, has experts behind its first layers, and some that all
  tokens share;
- DeepSeek-V3 and Moonlight weigh experts by sigmoids. Learnt numbers correct the choice, which may
  begin with groups of experts;
- GLM-4.7-Flash does the same, and names the layers that have experts;
- Youtu-LLM and MiniCPM3 have no experts. MiniCPM3 has factors like Granite's.

The truth is transformers' `modeling_{model_type}.py`.
"""

from dataclasses import dataclass, replace
from math import log
from typing import Protocol

import torch

from cetane.errors import CetaneError
from cetane.families.base import Block, Weight
from cetane.families.blocks import PreNormBlock
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, Multipliers, Norms, decoder_model
from cetane.families.deepseek_experts import (
    DeepseekExpertConfig,
    deepseek_block,
    deepseek_mixture,
    first_dense,
)
from cetane.families.experts import ExpertOptions, expert_channels, listed_dense
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import ALL, LayerKind
from cetane.families.latents import LatentAttention, LatentSizes
from cetane.families.layers import MLP, Held
from cetane.families.model import CacheGroup, Model
from cetane.families.rotary import rotary_table

Options = ExpertOptions
MODEL_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")

__all__ = ["MODEL_TYPES", "Options", "author"]


class DeepseekConfig(DecoderConfig, DeepseekExpertConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    head_dim: int
    """The width of the rotary table."""
    v_head_dim: int
    rope_interleave: bool
    """DeepSeek-V2 and MiniCPM3 have none: the former's pairs are neighbours, the latter's are
    not."""
    mlp_bias: bool
    """Only DeepSeek-V2 and MiniCPM3 have it."""
    first_k_dense_replace: int
    """Only a DeepSeek has it."""
    mlp_layer_types: list[str]
    """Only GLM-4.7-Flash has it. Youtu-LLM and MiniCPM3 have no key of experts."""
    topk_method: str
    """Only DeepSeek-V2 has it."""
    scale_emb: float
    scale_depth: float
    logits_scaling: float
    """Only MiniCPM3 has the last three."""


@dataclass(frozen=True)
class Traits(Multipliers):
    """What differs between the relatives, but for their experts."""

    interleaved: bool
    """See `LatentAttention`."""
    mlp_bias: bool = False


def traits(config: DeepseekConfig) -> Traits:
    """The traits of a config."""
    match config.model_type:
        case "deepseek_v2":
            return Traits(interleaved=True, mlp_bias=config.mlp_bias)
        case "minicpm3":
            return Traits(
                interleaved=False,
                mlp_bias=config.mlp_bias,
                embedding=config.scale_emb,
                residual=config.scale_depth * config.num_hidden_layers**-0.5,
                logits=1 / config.logits_scaling,
            )
    return Traits(config.rope_interleave)


def dense_layers(config: DeepseekConfig) -> list[bool]:
    """Whether every layer has one MLP for all tokens."""
    count = config.num_hidden_layers
    match config.model_type:
        case "minicpm3" | "youtu":
            return [True] * count
        case "glm4_moe_lite":
            return listed_dense(config)
    return first_dense(config)


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
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    own, scale, size, act = traits(config), options.scale, config.hidden_size, config.hidden_act
    sizes = LatentSizes(
        rank=config.kv_lora_rank,
        rotary=config.qk_rope_head_dim,
        plain=config.qk_nope_head_dim,
        values=config.v_head_dim,
        queries=config.q_lora_rank,
    )
    width, count = sizes.rank + sizes.rotary, config.num_attention_heads
    heads = AttentionHeads(count, 1, width, scores_factor(config), values=sizes.rank)
    kind = LayerKind(heads, rotary_table(config, sizes.rotary, part=1.0))
    norm, added = Norms(config, scale), scale * own.residual
    dense = dense_layers(config)
    experts = None if all(dense) else deepseek_mixture(config, options)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, alone in enumerate(dense):
            attention = LatentAttention(
                size, sizes, kind, config.attention_bias, added, own.interleaved
            )
            if experts is None or alone:
                mlp = MLP(size, config.intermediate_size, act, own.mlp_bias, added)
                layers.append(LatentBlock(index, norm(), attention, norm(), mlp))
                continue
            layers.append(LatentBlock(index, norm(), attention))
            layers.append(deepseek_block(config, experts, index, norm(), scale, own.mlp_bias))
    return decoder_model(
        config,
        layers,
        scale,
        [kind],
        embedding=own.embedding,
        logits=own.logits,
        memory={ALL: CacheGroup(count, 1, width // 2, latent=True)},
        channels=expert_channels(experts),
    )


def check(config: DeepseekConfig) -> None:
    """Raise CetaneError for a config that is not supported, or that transformers cannot run."""
    kind, rotary = config.model_type, config.qk_rope_head_dim
    if kind == "deepseek_v2" and config.topk_method != "greedy":
        raise CetaneError(f"topk_method {config.topk_method!r} is not supported; known: greedy")
    if (config.kv_lora_rank + rotary) % 2:
        raise CetaneError(
            f"kv_lora_rank = {config.kv_lora_rank} and qk_rope_head_dim = {rotary}: their sum is "
            "odd, which is not supported"
        )
    if config.head_dim != rotary:
        raise invalid(
            kind, f"head_dim = {config.head_dim} differs from qk_rope_head_dim = {rotary}"
        )
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    if kind == "glm4_moe_lite" and part != 1:
        raise invalid(
            kind, f"partial_rotary_factor = {part!r}, but {rotary} channels get positions"
        )
    if config.num_key_value_heads != config.num_attention_heads:
        raise invalid(
            kind,
            f"num_key_value_heads = {config.num_key_value_heads} differs from num_attention_heads "
            f"= {config.num_attention_heads}, but all heads share a latent",
        )
