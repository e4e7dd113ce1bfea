"""Llama and its relatives, which differ by what their configs say:

- SmolLM2 has nothing of its own; Mistral and Ministral may have windows;
- Qwen2 has biases on queries, keys and values;
- Qwen3 norms queries and keys;
- SmolLM3 has layers whose queries and keys have no positions;
- Granite has multipliers;
- Phi-3 and Phi-4-mini store q/k/v as one tensor, and gate/up as another. Only some channels of a
  head have positions.

The truth is transformers' `modeling_{model_type}.py`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Weight
from cetane.families.blocks import PreNormBlock
from cetane.families.configs import invalid
from cetane.families.decoder import DecoderConfig, Norms, decoder_model, heads_of
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import MLP, Held
from cetane.families.model import Model, Reach
from cetane.families.options import ResidualOptions
from cetane.families.rotary import first_positions, rotary_table

Options = ResidualOptions
MODEL_TYPES = (
    "granite", "llama", "ministral", "ministral3", "mistral", "phi3", "qwen2", "qwen3", "smollm3",
)  # fmt: skip

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Phi-3's tensors, and the projections that their rows are."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class LlamaConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    """Only Llama, Qwen3, SmolLM3 and Granite have it."""
    mlp_bias: bool
    """Only Llama, SmolLM3 and Granite have it."""
    sliding_window: int | None
    """Only Mistral, Ministral, Phi-3, Qwen and SmolLM3 have it."""
    layer_types: list[str]
    """Only Ministral, Qwen and SmolLM3 have it."""
    no_rope_layers: list[int]
    """Only SmolLM3 has it: 0 for a layer that does not turn queries and keys."""
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Only Granite has the last four."""


@dataclass(frozen=True)
class Traits:
    """What differs between the relatives, but for windows and rotary tables."""

    form: AttentionForm
    mlp_bias: bool = False
    scores: float | None = None
    """The factor on scores; None for one over the root of a head's width."""
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    """Factors on the embedding, on what attention and MLP add, and on logits."""


def traits(config: LlamaConfig) -> Traits:
    """The traits of a config."""
    match config.model_type:
        case "llama" | "smollm3":
            own = config.attention_bias
            return Traits(AttentionForm(qkv_bias=own, out_bias=own), config.mlp_bias)
        case "qwen2":
            return Traits(AttentionForm(qkv_bias=True))
        case "qwen3":
            own = config.attention_bias
            return Traits(AttentionForm(qkv_bias=own, out_bias=own, norms="head"))
        case "granite":
            return multiplied(config, config.mlp_bias)
    return Traits(AttentionForm())


def multiplied(config: LlamaConfig, mlp_bias: bool = False) -> Traits:
    """The traits of a Granite."""
    own = config.attention_bias
    return Traits(
        AttentionForm(qkv_bias=own, out_bias=own),
        mlp_bias,
        scores=config.attention_multiplier,
        embedding=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logits=1 / config.logits_scaling,
    )


class PhiLayer(PreNormBlock):
    """A layer whose projections of one input are stored as one tensor."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        plain = super().weight(path, shape, held)
        module, _, name = path.removesuffix(".weight").rpartition(".")
        whole = next((whole for whole, parts in FUSED.items() if name in parts), None)
        if whole is None:
            return plain
        sizes = [int(self.part(f"{module}.{part}").outputs) for part in FUSED[whole]]
        number = FUSED[whole].index(name)
        start = sum(sizes[:number])
        return replace(
            plain,
            name=f"{self.prefix}{module}.{whole}.weight",
            stored=(sum(sizes), *held.stored[1:]),
            rows=(start, start + sizes[number]),
        )


def author(config: LlamaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    own, scale, size = traits(config), options.scale, config.hidden_size
    kinds, norm, added = layer_kinds(config, own.scores), Norms(config, scale), scale * own.residual
    block = PhiLayer if config.model_type == "phi3" else PreNormBlock
    layers = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            inner, act = config.intermediate_size, config.hidden_act
            attention = Attention(size, config.rms_norm_eps, kind, own.form, added)
            mlp = MLP(size, inner, act, own.mlp_bias, added)
            layers.append(block(index, norm(), attention, norm(), mlp))
    return decoder_model(
        config, layers, scale, kinds, embedding=own.embedding, logits=own.logits,
        reach=reach(config),
    )  # fmt: skip


def reach(config: LlamaConfig) -> Reach:
    """The positions before a Ministral 3 multiplies its queries by a factor; of others, all."""
    positions = config.max_position_embeddings
    if config.model_type != "ministral3":
        return positions, None
    first = first_positions(config, positions)
    late = config.rope_parameters["llama_4_scaling_beta"]
    return (first, "multiplies queries by a factor") if late else (positions, None)


def check(config: LlamaConfig) -> None:
    """Raise CetaneError for a Ministral 3 without the numbers of its factor on late queries:
    transformers cannot run it."""
    if config.model_type != "ministral3":
        return
    for key in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        value = config.rope_parameters.get(key)
        if not isinstance(value, int | float):
            raise invalid(config.model_type, f"rope_parameters: {key} = {value!r}, not a number")


def layer_kinds(config: LlamaConfig, scores: float | None = None) -> list[LayerKind]:
    """The kind of every layer: whether it slides, and whether its queries and keys have
    positions."""
    heads = heads_of(config, scores)
    phi = config.model_type == "phi3"
    part = config.rope_parameters.get("partial_rotary_factor") if phi else None
    rotary = rotary_table(config, heads.dim, part=part)
    return [
        LayerKind(heads, rotary, window, positioned=positioned)
        for window, positioned in zip(layer_windows(config), positioned_layers(config), strict=True)
    ]


def positioned_layers(config: LlamaConfig) -> list[bool]:
    """Whether the queries and keys of each layer have positions. CetaneError if a SmolLM3 does not
    say it of all layers."""
    count = config.num_hidden_layers
    if config.model_type != "smollm3":
        return [True] * count
    positioned = [bool(one) for one in config.no_rope_layers[:count]]
    if len(positioned) < count:
        raise invalid(
            "smollm3", f"no_rope_layers has {len(positioned)} entries, num_hidden_layers = {count}"
        )
    return positioned


def layer_windows(config: LlamaConfig) -> list[int | None]:
    """The attention window of every layer, in tokens; None for full attention. CetaneError if a
    layer slides and the config has no window."""
    if config.model_type in ("llama", "granite", "granitemoe", "olmoe"):
        return [None] * config.num_hidden_layers
    if config.model_type in ("ministral3", "mistral", "mixtral", "phi3", "qwen3_moe"):
        return [config.sliding_window] * config.num_hidden_layers
    return [config.sliding_window if name == "sliding" else None for name in kind_names(config)]
