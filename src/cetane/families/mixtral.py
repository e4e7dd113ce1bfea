"""Mixtral and its relatives: Llama's attention, and many experts of which a token takes a few.

- Granite-MoE has Granite's multipliers; Granite-MoE-Shared also has an MLP for all tokens;
- OLMoE norms all heads of queries and keys together;
- Qwen2-MoE has biases on queries, keys and values, and an expert that all tokens share;
- Qwen3-MoE norms queries and keys. Some layers of both Qwens have no experts;
- ERNIE 4.5 corrects the choice of experts, and pairs neighbouring channels of a head;
- Hunyuan-MoE norms queries and keys after they got their positions;
- dots.llm1, EXAONE-MoE, GLM-4.5 and Solar Open have DeepSeek-V3's experts. GLM-4.5 gives
  positions to a part of each head. If some layers of an EXAONE slide, the others have none;
- Mellum 2 is Qwen3-MoE with a rotary table for each type of layer;
- MiniMax-M2 norms all heads together, gives positions to a part of each, and weighs experts by
  sigmoids, whose choice is corrected;
- Hunyuan 3 weighs and corrects so too, with a factor. It norms queries and keys.

The truth is transformers' `modeling_{model_type}.py`.
"""

from dataclasses import replace
from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm, normed_by
from cetane.families.base import Block, Weight
from cetane.families.blocks import PartNames, PreNormBlock
from cetane.families.configs import check_entries, unsupported
from cetane.families.decoder import Norms, decoder_model, heads_of
from cetane.families.deepseek_experts import (
    DeepseekExpertConfig,
    deepseek_block,
    deepseek_mixture,
    first_dense,
)
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    SharedExpert,
    expert_channels,
    is_dense,
    listed_dense,
    mixture_of,
)
from cetane.families.kinds import KINDS, LayerKind, kind_names
from cetane.families.layers import MLP, Held, RMSNorm
from cetane.families.llama import HUNYUAN_NORMS, LlamaConfig, Traits, layer_kinds, multiplied
from cetane.families.model import Model
from cetane.families.rotary import rotary_table
from cetane.families.stored import FusedRows, InterleavedBlock

Options = ExpertOptions
MODEL_TYPES = (
    "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "granitemoe", "granitemoeshared",
    "hunyuan_v1_moe", "hy_v3", "mellum", "minimax_m2", "mixtral", "olmoe", "qwen2_moe",
    "qwen3_moe", "solar_open",
)  # fmt: skip
DEEPSEEKS = ("dots1", "exaone_moe", "glm4_moe", "solar_open")
"""The model types with DeepSeek-V3's experts."""
GRANITES = ("granitemoe", "granitemoeshared")
QWENS = ("mellum", "qwen2_moe", "qwen3_moe")
BY_SIGMOID = ("hy_v3", "minimax_m2")
"""The model types outside `DEEPSEEKS` that weigh experts by sigmoids."""
TYPED = ("exaone_moe", "hy_v3", "mellum")
"""The model types that name the MLP of each layer."""
LEAST_SUM = 1e-6
"""The largest `moe_norm_min` that changes no weight: the weights of chosen experts sum to more."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class MixtralConfig(LlamaConfig, DeepseekExpertConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_experts: int
    num_local_experts: int
    """The Granites have it in place of `num_experts`."""
    num_experts_per_tok: int
    moe_topk: int | list[int]
    """Hunyuan has it in place of `num_experts_per_tok`, and perhaps one for each layer."""
    norm_topk_prob: bool
    """Only OLMoE, the Qwens and those in `DEEPSEEKS` have it: the others always divide."""
    moe_intermediate_size: int
    """The Qwens, ERNIE and those in `DEEPSEEKS` have it; `intermediate_size` is then of layers
    without experts."""
    mlp_only_layers: list[int]
    decoder_sparse_step: int
    """Only Qwen2-MoE and Qwen3-MoE have the last two: layers without experts."""
    mlp_layer_types: list[str]
    """Those in `TYPED` have it."""
    first_k_dense_replace: int
    """Only dots.llm1 and GLM-4.5 have it."""
    moe_layer_start_index: int
    moe_layer_end_index: int
    moe_layer_interval: int
    moe_num_shared_experts: int
    moe_norm_min: float
    """Only ERNIE has the last five."""
    shared_intermediate_size: int
    """Only Granite-MoE-Shared has it."""
    qkv_bias: bool
    shared_expert_intermediate_size: int
    """Only Qwen2-MoE has the last two."""
    use_qk_norm: bool
    """Only GLM-4.5 has it."""
    clip_qkv: float | None
    """Only OLMoE has it."""
    router_scaling_factor: float
    """Only Hunyuan 3 has it."""


class ErnieBlock(MixtureBlock):
    """Experts whose corrections are stored as a row."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        return replace(plain, stored=(1, *plain.stored)) if path == "correction.numbers" else plain


class GraniteBlock(FusedRows, MixtureBlock):
    """Experts beside an MLP that stores gates and ups as one tensor."""

    fused = ("input_linear",)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        name = plain.name.replace("shared_mlp.down_proj", "shared_mlp.output_linear")
        return replace(plain, name=name)


def granite_block(
    experts: Mixture, index: int, norm: RMSNorm, shared: SharedExpert | None
) -> GraniteBlock:
    """The experts of a layer of a Granite; `shared` is the MLP that all tokens take, if any."""
    names = PartNames(mlp="block_sparse_moe")
    return GraniteBlock(
        experts, index, norm, "router", shared=shared, shared_name="shared_mlp", names=names
    )


def traits(config: MixtralConfig) -> Traits:
    """What differs between the relatives, but for experts."""
    match config.model_type:
        case "granitemoe" | "granitemoeshared":
            return multiplied(config, 1 / config.logits_scaling)
        case "ernie4_5_moe" | "mixtral":
            return Traits(AttentionForm())
        case "exaone_moe":
            return Traits(AttentionForm(norms="head"))
        case "minimax_m2":
            return Traits(AttentionForm(norms="whole"))
        case "solar_open":
            return Traits(AttentionForm(qkv_bias=config.attention_bias))
        case "qwen2_moe":
            return Traits(AttentionForm(qkv_bias=config.qkv_bias))
        case "glm4_moe":
            bias, normed = config.attention_bias, config.use_qk_norm
            return Traits(AttentionForm(qkv_bias=bias, norms=normed_by("head", normed)))
    own = config.attention_bias
    match config.model_type:
        case "hunyuan_v1_moe":
            return Traits(AttentionForm(own, own, **HUNYUAN_NORMS))
        case "hy_v3":
            return Traits(AttentionForm(own, own, norms="head"), config.mlp_bias)
        case "dots1" | "mellum" | "qwen3_moe":
            return Traits(AttentionForm(qkv_bias=own, out_bias=own, norms="head"))
    clip = config.clip_qkv
    return Traits(AttentionForm(qkv_bias=own, out_bias=own, norms="whole", clip=clip))


def author(config: MixtralConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    own, scale, size = traits(config), options.scale, config.hidden_size
    kinds = (
        typed_kinds(config) if config.model_type == "mellum" else layer_kinds(config, own.scores)
    )
    norm, added = Norms(config, scale), scale * own.residual
    dense, chosen = dense_layers(config), chosen_experts(config)
    experts = None if all(dense) else mixture(config, options, own.residual, chosen[0])
    block = InterleavedBlock if config.model_type == "ernie4_5_moe" else PreNormBlock
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            attention = Attention(size, config.rms_norm_eps, kind, own.form, added)
            if experts is None or dense[index]:
                inner, act = config.intermediate_size, config.hidden_act
                mlp = MLP(size, inner, act, own.mlp_bias, added)
                layers.append(block(index, norm(), attention, norm(), mlp))
                continue
            layers.append(block(index, norm(), attention))
            some = replace(experts, chosen=chosen[index])
            layers.append(mixture_block(config, some, index, norm(), added))
    return decoder_model(
        config,
        layers,
        scale,
        kinds,
        embedding=own.embedding,
        logits=own.logits,
        channels=expert_channels(experts),
    )


def typed_kinds(config: MixtralConfig) -> list[LayerKind]:
    """The kind of every layer, where each type of layers has a rotary table."""
    heads = heads_of(config)
    kinds = {
        name: LayerKind(
            heads,
            rotary_table(config, heads.dim, layer_type),
            config.sliding_window if name == "sliding" else None,
            name=name,
            table=name,
        )
        for layer_type, name in KINDS.items()
        if layer_type in config.layer_types
    }
    return [kinds[name] for name in kind_names(config)]


def dense_layers(config: MixtralConfig) -> list[bool]:
    """Whether every layer has one MLP for all tokens."""
    layers = range(config.num_hidden_layers)
    if config.model_type in TYPED:
        return listed_dense(config)
    if config.model_type in QWENS:
        return [is_dense(config, index) for index in layers]
    if config.model_type in ("dots1", "glm4_moe"):
        return first_dense(config)
    if config.model_type != "ernie4_5_moe":
        return [False for _ in layers]
    some = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    return [index not in some or (index + 1) % config.moe_layer_interval != 0 for index in layers]


def chosen_experts(config: MixtralConfig) -> list[int]:
    """The number of experts that a token takes in every layer."""
    count = config.num_hidden_layers
    if config.model_type != "hunyuan_v1_moe":
        return [config.num_experts_per_tok] * count
    chosen = config.moe_topk
    if not isinstance(chosen, list):
        return [chosen] * count
    check_entries(config.model_type, "moe_topk", chosen, count)
    return chosen


def mixture(config: MixtralConfig, options: ExpertOptions, residual: float, chosen: int) -> Mixture:
    """The experts of layers that have some; `residual` is the model's factor on what they add."""
    kind = config.model_type
    if kind in DEEPSEEKS:
        return deepseek_mixture(config, options)
    count = config.num_local_experts if kind in GRANITES else config.num_experts
    narrow = kind in (*QWENS, "ernie4_5_moe", "hy_v3")
    inner = config.moe_intermediate_size if narrow else config.intermediate_size
    normalised = kind not in (*QWENS, "olmoe") or config.norm_topk_prob
    factor = config.router_scaling_factor if kind == "hy_v3" else residual
    return mixture_of(
        config, options, count, inner, normalised, factor, chosen, sigmoid=kind in BY_SIGMOID
    )


def mixture_block(
    config: MixtralConfig, experts: Mixture, index: int, norm: RMSNorm, factor: float
) -> MixtureBlock:
    """The experts of a layer. `factor` is that on the output of what all tokens share."""

    def shared(inner: int, gated: bool = False) -> SharedExpert | None:
        hidden, act = experts.hidden, experts.act
        return SharedExpert(hidden, inner, act, factor, gated=gated) if inner else None

    match config.model_type:
        case "dots1" | "exaone_moe" | "glm4_moe" | "solar_open":
            return deepseek_block(config, experts, index, norm, factor)
        case "ernie4_5_moe":
            return ErnieBlock(
                experts,
                index,
                norm,
                shared=shared(experts.inner * config.moe_num_shared_experts),
                shared_name="mlp.shared_experts",
                correction="gate.moe_statics.e_score_correction_bias",
            )
        case "granitemoe" | "granitemoeshared":
            shares = config.model_type == "granitemoeshared"
            own = shared(config.shared_intermediate_size) if shares else None
            return granite_block(experts, index, norm, own)
        case "hunyuan_v1_moe":
            together = shared(experts.inner)
            return MixtureBlock(
                experts, index, norm, "gate.wg", shared=together, shared_name="mlp.shared_mlp"
            )
        case "hy_v3":
            narrow = experts.inner * config.num_shared_experts
            return MixtureBlock(
                experts,
                index,
                norm,
                shared=SharedExpert(experts.hidden, narrow, experts.act, factor, config.mlp_bias),
                shared_name="mlp.shared_experts",
                correction="e_score_correction_bias",
            )
        case "minimax_m2":
            return MixtureBlock(experts, index, norm, correction="e_score_correction_bias")
        case "qwen2_moe":
            together = shared(config.shared_expert_intermediate_size, gated=True)
            return MixtureBlock(experts, index, norm, shared=together)
    return MixtureBlock(experts, index, norm)


def check(config: MixtralConfig) -> None:
    """Raise CetaneError for an ERNIE that is not supported; none is released."""
    if config.model_type != "ernie4_5_moe":
        return
    if config.use_bias:
        raise unsupported(config.model_type, "use_bias = True, which gives the head biases")
    if config.moe_norm_min > LEAST_SUM:
        raise unsupported(
            config.model_type,
            f"moe_norm_min = {config.moe_norm_min:g}, more than {LEAST_SUM:g}",
        )
