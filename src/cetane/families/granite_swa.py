"""Granite with windows: most layers slide, scores have a sink for each head, and every layer has
its own base of positions, or none. The rest is Granite's, dense or with experts.

The truth is transformers' `modeling_granite_swa.py` and `modeling_granitemoe_swa.py`.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

import torch

from cetane.families.attention import Attention
from cetane.families.base import Block
from cetane.families.configs import check_entries
from cetane.families.decoder import Norms, decoder_model, heads_of
from cetane.families.experts import ExpertOptions, SharedExpert, expert_channels, mixture_of
from cetane.families.kinds import DEFAULT, LayerKind, kind_names
from cetane.families.layers import MLP
from cetane.families.llama import LlamaConfig, multiplied
from cetane.families.mixtral import granite_block
from cetane.families.model import Model
from cetane.families.rotary import RotaryTable, rotary_table
from cetane.families.stored import SinkBlock

Options = ExpertOptions
MODEL_TYPES = ("granite_swa", "granitemoe_swa")

__all__ = ["MODEL_TYPES", "Options", "author"]


class GraniteSWAConfig(LlamaConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    layer_rope_theta: list[float]
    """The base of each layer's positions; 0 for none."""
    num_local_experts: int
    num_experts_per_tok: int
    shared_intermediate_size: int
    """Only `granitemoe_swa` has the last three; 0 for no MLP that all tokens share."""


class WithBase:
    """A config whose positions have another base."""

    def __init__(self, config: GraniteSWAConfig, base: float) -> None:
        self._config = config
        self.model_type = config.model_type
        self.rope_parameters = {**config.rope_parameters, "rope_theta": base}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def author(config: GraniteSWAConfig, options: ExpertOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    many = config.model_type == "granitemoe_swa"
    own, scale = multiplied(config, 1 / config.logits_scaling), options.scale
    size, inner, act = config.hidden_size, config.intermediate_size, config.hidden_act
    norm, added, form = Norms(config, scale), scale * own.residual, replace(own.form, sinks=True)
    kinds = layer_kinds(config, own.scores)
    experts = (
        mixture_of(config, options, config.num_local_experts, inner, True, own.residual)
        if many
        else None
    )
    shared = config.shared_intermediate_size if many else 0
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            attention = Attention(size, config.rms_norm_eps, kind, form, added)
            if experts is None:
                mlp = MLP(size, inner, act, config.mlp_bias, added)
                layers.append(SinkBlock(index, norm(), attention, norm(), mlp))
                continue
            layers.append(SinkBlock(index, norm(), attention))
            together = SharedExpert(size, shared, act, added) if shared else None
            layers.append(granite_block(experts, index, norm(), together))
    return decoder_model(
        config,
        layers,
        scale,
        kinds,
        embedding=own.embedding,
        logits=own.logits,
        channels=expert_channels(experts),
    )


def layer_kinds(config: GraniteSWAConfig, scores: float | None) -> list[LayerKind]:
    """The kind of every layer. CetaneError if some layers have no base."""
    names, bases = kind_names(config), config.layer_rope_theta
    check_entries(config.model_type, "layer_rope_theta", bases, len(names))
    heads = heads_of(config, scores)
    windows = {"sliding": config.sliding_window, "full": None}
    tables = tables_of(config, bases[: len(names)], heads.dim)
    unplaced = DEFAULT, rotary_table(config, heads.dim)
    kinds = []
    for name, base in zip(names, bases, strict=False):
        table, rotary = tables[base] if base else unplaced
        kinds.append(
            LayerKind(heads, rotary, windows[name], name=name, table=table, positioned=bool(base))
        )
    return kinds


def tables_of(
    config: GraniteSWAConfig, bases: Iterable[float], dim: int
) -> dict[float, tuple[str, RotaryTable]]:
    """The name and the rotary table of each base."""
    others = [base for base in dict.fromkeys(bases) if base]
    return {
        base: (f"base{number}" if number else DEFAULT, rotary_table(WithBase(config, base), dim))
        for number, base in enumerate(others)
    }
