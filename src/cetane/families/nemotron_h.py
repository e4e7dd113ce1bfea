"""Nemotron-H: every layer is one of Mamba-2, attention without positions, an MLP or experts, behind
a norm. MLP and experts have squared ReLUs and no gates. Experts are chosen as in DeepSeek-V3.

The truth is transformers' `modeling_nemotron_h.py`.
"""

from dataclasses import replace
from functools import partial
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory, Truth, Weight
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.configs import unsupported
from cetane.families.decoder import DecoderConfig, decoder_model, heads_of
from cetane.families.deepseek_experts import expert_groups
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    SharedExpert,
    expert_channels,
)
from cetane.families.kinds import FULL, LINEAR, LayerKind, check_types
from cetane.families.layers import MLP, UNGATED, Held, RMSNorm
from cetane.families.mamba2 import Mamba2, Mamba2Form, MambaRows, grouped, step_bounds
from cetane.families.model import Model, StoredTable
from cetane.families.options import residual_eps
from cetane.families.rotary import RotaryTable

Options = ExpertOptions
MODEL_TYPES = ("nemotron_h",)
DENSE, SPARSE = "mlp", "moe"
"""The types of layers that mix no tokens."""
PARTS = {LINEAR: "mamba", FULL: "self_attn", DENSE: "mlp"}
"""The names of what a layer has behind its norm. The checkpoint calls all of them `STORED`."""
STORED = "mixer"
EXPERTS = PartNames(mlp_norm="norm", mlp=STORED)

__all__ = ["MODEL_TYPES", "Options", "author"]


class NemotronHConfig(DecoderConfig, Protocol):
    """The keys that are read from a NemotronHConfig."""

    layer_types: list[str]
    sliding_window: int | None
    """It has no effect."""
    layer_norm_epsilon: float
    mlp_hidden_act: str
    mlp_bias: bool
    mamba_num_heads: int
    mamba_head_dim: int
    mamba_hidden_act: str
    n_groups: int
    ssm_state_size: int
    conv_kernel: int
    use_conv_bias: bool
    use_bias: bool
    """Whether the projections of Mamba-2 have biases."""
    time_step_min: float
    """The least step. `time_step_limit` has no effect."""
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    moe_shared_expert_intermediate_size: int
    moe_latent_size: int | None
    n_group: int | None
    topk_group: int | None
    norm_topk_prob: bool
    routed_scaling_factor: float


class LoneMLP(MLP, Mixer):
    """An MLP in a mixer's place."""

    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class NemotronHBlock(MambaRows, PreNormBlock):
    """A layer without experts. The checkpoint has one name for what is behind the norm."""

    def truths(self) -> dict[str, Truth]:
        return Block.truths(self)

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        return replace(plain, name=plain.name.replace(f".{self.names.mixer}.", f".{STORED}."))


def mamba2_form(config: NemotronHConfig) -> Mamba2Form:
    """The layers of Mamba-2."""
    kind, heads, groups = config.model_type, config.mamba_num_heads, config.n_groups
    return Mamba2Form(
        size=config.hidden_size,
        heads=grouped(kind, heads, groups, config.ssm_state_size, config.mamba_head_dim),
        taps=config.conv_kernel,
        act=config.mamba_hidden_act,
        eps=config.layer_norm_epsilon,
        bounds=step_bounds(kind, config.time_step_min, inf),
        bias=config.use_bias,
        out_bias=config.use_bias,
        conv_bias=config.use_conv_bias,
    )


def mixture(config: NemotronHConfig, options: ExpertOptions) -> Mixture:
    """The experts of a layer. CetaneError for experts that read fewer channels than the layer."""
    if config.moe_latent_size is not None:
        raise unsupported(config.model_type, f"moe_latent_size = {config.moe_latent_size}")
    groups, opened = expert_groups(config, config.n_routed_experts)
    return Mixture(
        hidden=config.hidden_size,
        inner=config.moe_intermediate_size,
        count=config.n_routed_experts,
        chosen=config.num_experts_per_tok,
        normalised=config.norm_topk_prob,
        act=config.mlp_hidden_act,
        together=options.together,
        factor=options.scale * config.routed_scaling_factor,
        gated=False,
        sigmoid=True,
        groups=groups,
        open_groups=opened,
    )


def author(config: NemotronHConfig, options: ExpertOptions) -> Model:
    """The model of a NemotronHConfig."""
    types = config.layer_types
    check_types(config, (*PARTS, SPARSE))
    scale, size, eps = options.scale, config.hidden_size, config.layer_norm_epsilon
    act, bias, form = config.mlp_hidden_act, config.mlp_bias, AttentionForm()
    kind = LayerKind(heads_of(config), RotaryTable(torch.empty(0)), positioned=False)
    mamba = mamba2_form(config) if LINEAR in types else None
    experts = mixture(config, options) if SPARSE in types else None
    norm = partial(RMSNorm, size, residual_eps(eps, scale))
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(types):
            if experts is not None and layer_type == SPARSE:
                inner = config.moe_shared_expert_intermediate_size or config.intermediate_size
                shared = SharedExpert(size, inner, act, scale, bias, names=UNGATED)
                layers.append(
                    MixtureBlock(
                        experts,
                        index,
                        norm(),
                        shared=shared,
                        shared_name=f"{STORED}.shared_experts",
                        names=EXPERTS,
                        correction="gate.e_score_correction_bias",
                    )
                )
                continue
            mixer: Mixer
            if mamba is not None and layer_type == LINEAR:
                mixer = Mamba2(mamba, scale)
            elif layer_type == FULL:
                mixer = Attention(size, eps, kind, form, scale)
            else:
                inner = config.intermediate_size
                mixer = LoneMLP(size, inner, act, bias, scale, names=UNGATED)
            name = PARTS[layer_type]
            names = PartNames(norm="norm", mixer=name)
            layers.append(NemotronHBlock(index, norm(), mixer, names=names, alone=name))
    return decoder_model(
        config,
        layers,
        scale,
        [kind] if FULL in types else [],
        embedding=StoredTable("model.embeddings.weight", factor=scale),
        norm="model.norm_f.weight",
        eps=eps,
        memory={} if mamba is None else mamba.memory,
        channels=expert_channels(experts),
    )
