"""Qwen3-Next and Qwen3.5, the text part: three layers of the gated delta rule for each that
attends, with gates on what both give. Behind them an MLP, or experts and one that all tokens share.

The truth is transformers' `modeling_qwen3_next.py`, `modeling_qwen3_5.py` and
`modeling_qwen3_5_moe.py`. Checkpoints store gains less one, but for the delta rule's norm.
"""

from dataclasses import replace
from functools import partial
from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Weight
from cetane.families.blocks import Mixer, PartNames, PreNormBlock
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.delta import LAYER_TYPES, DeltaConfig, DeltaNet, delta_heads
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    SharedExpert,
    expert_channels,
    is_dense,
    mixture_of,
)
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import FULL, LINEAR, KindsConfig, LayerKind, check_types
from cetane.families.layers import MLP, Held, RowPick
from cetane.families.matrices import MatrixHeads
from cetane.families.model import Model
from cetane.families.rotary import rotary_table
from cetane.families.stored import parts_of

Options = ExpertOptions
MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")

__all__ = ["MODEL_TYPES", "Options", "author"]


class Qwen3NextConfig(DecoderConfig, DeltaConfig, KindsConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    head_dim: int
    hidden_act: str
    attention_bias: bool
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    """Qwen3.5 without experts has none of these four."""
    norm_topk_prob: bool
    mlp_only_layers: list[int]
    decoder_sparse_step: int
    """Only Qwen3-Next has the last three."""


Together = tuple[str, int, tuple[int, ...], tuple[int, ...]]
"""The place of a projection that is stored together with others. These are the tensor's name, the
number of heads, the rows of each part of a head, and the numbers of its own parts."""


def stored_together(
    model_type: str, delta: MatrixHeads, heads: AttentionHeads
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
    qkvz = "linear_attn.in_proj_qkvz", delta.key_heads, (delta.keys, delta.keys, values, values)
    ba = "linear_attn.in_proj_ba", delta.key_heads, (delta.groups, delta.groups)
    return attention | {
        "linear_attn.in_proj_qkv": (*qkvz, (0, 1, 2)),
        "linear_attn.in_proj_z": (*qkvz, (3,)),
        "linear_attn.in_proj_b": (*ba, (0,)),
        "linear_attn.in_proj_a": (*ba, (1,)),
    }


class MixBlock(PreNormBlock):
    """A layer whose projections may be stored together."""

    together: dict[str, Together]

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
            pick=RowPick(partial(parts_of, heads, sizes, wanted)),
            part=module.rpartition(".")[2],
        )


def author(config: Qwen3NextConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check_types(config, LAYER_TYPES)
    scale, size = options.scale, config.hidden_size
    act, eps = config.hidden_act, config.rms_norm_eps
    heads, delta, taps = heads_of(config), delta_heads(config), config.linear_conv_kernel_dim
    part = config.rope_parameters.get("partial_rotary_factor", 1.0)
    kind = LayerKind(heads, rotary_table(config, heads.dim, part=part))
    norm, bias = Norms(config, scale, unit_offset=True), config.attention_bias
    form = AttentionForm(
        bias, bias, norms="head", unit_offset=True, gates="channel", gate_bias=bias
    )
    together, dense = stored_together(config.model_type, delta, heads), dense_layers(config)
    experts = None if all(dense) else mixture(config, options)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, layer_type in enumerate(config.layer_types):
            mixer: Mixer
            if layer_type == FULL:
                mixer, names = Attention(size, eps, kind, form, scale), PartNames()
            else:
                mixer = DeltaNet(size, delta, taps, act, eps, scale)
                names = PartNames(mixer="linear_attn")
            own = dense[index]
            mlp = MLP(size, config.intermediate_size, act, factor=scale) if own else None
            block = MixBlock(index, norm(), mixer, norm() if own else None, mlp, names, "mix")
            block.together = together
            layers.append(block)
            if experts is not None and not own:
                inner = config.shared_expert_intermediate_size
                shared = SharedExpert(size, inner, act, scale, gated=True) if inner else None
                layers.append(MixtureBlock(experts, index, norm(), shared=shared))
    return decoder_model(
        config,
        layers,
        scale,
        [kind] if FULL in config.layer_types else [],
        memory=delta.memory("delta", taps) if LINEAR in config.layer_types else {},
        channels=expert_channels(experts),
        unit_offset=True,
    )


def dense_layers(config: Qwen3NextConfig) -> list[bool]:
    """Whether every layer has one MLP for all tokens. Qwen3.5 has experts in all layers or in
    none."""
    count = len(config.layer_types)
    if config.model_type == "qwen3_next":
        return [is_dense(config, index) for index in range(count)]
    return [config.model_type == "qwen3_5_text"] * count


def mixture(config: Qwen3NextConfig, options: ExpertOptions) -> Mixture:
    """The experts of layers that have some."""
    normalised = config.model_type != "qwen3_next" or config.norm_topk_prob
    inner = config.moe_intermediate_size
    return mixture_of(config, options, config.num_experts, inner, normalised)
