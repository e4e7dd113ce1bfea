"""Llama and its relatives, which differ by what their configs say:

- SmolLM2 has nothing of its own, nor have InternLM3 and IQuest-Coder; Mistral and Ministral may
  have windows;
- Qwen2 has biases on queries, keys and values;
- Qwen3 norms queries and keys;
- SmolLM3 has layers whose queries and keys have no positions;
- Granite has multipliers;
- Phi-3 and Phi-4-mini store q/k/v as one tensor, and gate/up as another. Only some channels of a
  head have positions;
- Arcee has no gates in its MLPs;
- Seed-OSS has biases of its own, and Code World Model may have windows;
- ERNIE 4.5 and Helium pair neighbouring channels of a head;
- Hunyuan norms queries and keys after they got their positions;
- HyperCLOVA X has Granite's multipliers, and norms after attention and MLP too;
- Gemma's checkpoints store gains less one, and its embeddings have a factor;
- Apertus has an activation with parameters, xIELU, in MLPs without gates;
- BitNet has a norm of what the heads give and one of an MLP's inner channels, before what reads
  them;
- nanochat has norms without gains everywhere, on the embedding too. Heads rotate the other way.

The truth is transformers' `modeling_{model_type}.py`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from cetane.families.attention import Attention, AttentionForm
from cetane.families.base import Block, Flow, Memory, Weight
from cetane.families.blocks import NAMES, PartNames, PreNormBlock, SandwichBlock, SandwichNames
from cetane.families.configs import LARGEST, check_entries, invalid
from cetane.families.decoder import DecoderConfig, Multipliers, Norms, decoder_model, heads_of
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import GATED, MLP, UNGATED, XIELU, Held, RMSNorm
from cetane.families.model import Model, Reach
from cetane.families.options import ResidualOptions
from cetane.families.rotary import RotaryTable, first_positions, of_base, rotary_table
from cetane.families.stored import ExchangedHalvesBlock, FusedBlock, InterleavedBlock

Options = ResidualOptions
MODEL_TYPES = (
    "apertus", "arcee", "bitnet", "cwm", "ernie4_5", "exaone", "gemma", "granite", "helium",
    "hunyuan_v1_dense", "hyperclovax", "internlm3", "iquestcoder", "llama", "ministral",
    "ministral3", "mistral", "nanochat", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3",
)  # fmt: skip
AROUND = SandwichNames(
    after="post_norm1", mlp_norm="post_attention_layernorm", mlp_after="post_norm2"
)
"""HyperCLOVA X's names for its norms."""
HUNYUAN_NORMS: dict[str, Any] = {
    "norms": "head", "normed": ("query_layernorm", "key_layernorm"), "normed_last": True,
}  # fmt: skip
"""How Hunyuan norms queries and keys: fields of `AttentionForm`."""
APERTUS = PartNames(norm="attention_layernorm", mlp_norm="feedforward_layernorm")
"""Apertus' names for its norms."""
LAYERS_SLIDE = ("cwm", "dots1", "exaone_moe", "ministral", "qwen2", "qwen2_moe", "qwen3", "smollm3")
"""The model types that say of each layer whether it has the window."""
PARTLY_ROTARY = ("glm4_moe", "minimax_m2", "phi3")
"""The model types that give positions to only a part of each head."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class LlamaConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_hidden_layers: int
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    """`traits` says which model types read these two."""
    attention_out_bias: bool
    """Only Seed-OSS has it."""
    use_bias: bool
    """Only ERNIE has it."""
    sliding_window: int | None
    """Only Code World Model, Mistral, Ministral, Phi-3, Qwen and SmolLM3 have it."""
    layer_types: list[str]
    """Only Code World Model, Ministral, Qwen and SmolLM3 have it."""
    no_rope_layers: list[int]
    """Only SmolLM3 has it: 0 for a layer that gives queries and keys no positions."""
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Only Granite and HyperCLOVA X have the last four."""
    use_post_norm: bool
    """Only HyperCLOVA X has it."""
    final_logit_softcapping: float | None
    """Only nanochat has it."""


class ApertusBlock(PreNormBlock):
    """A layer whose MLP has an activation with parameters."""

    def weight(self, path: str, shape: tuple[int, ...], held: Held) -> Weight:
        return super().weight(path.replace("mlp.act.", "mlp.act_fn."), shape, held)


class NanochatBlock(ExchangedHalvesBlock):
    """A layer of nanochat. The first one norms the embedding, `first`, before all else."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.first: RMSNorm | None = None

    def forward(self, flow: Flow, memory: Memory) -> None:
        if self.first is not None:
            flow["hidden"] = self.first(flow["hidden"])
        super().forward(flow, memory)


BLOCKS = {
    "apertus": ApertusBlock, "ernie4_5": InterleavedBlock, "helium": InterleavedBlock,
    "nanochat": NanochatBlock, "phi3": FusedBlock,
}  # fmt: skip
"""The layers of model types that store parameters otherwise than most."""


@dataclass(frozen=True)
class Traits(Multipliers):
    """What differs between the relatives, but for windows and rotary tables."""

    form: AttentionForm
    mlp_bias: bool = False
    mlp_names: tuple[str, ...] = GATED
    scores: float | None = None
    """The factor on scores; None for one over the root of a head's width."""
    unit_offset: bool = False
    """Whether the checkpoint stores the gains of norms less one."""
    gains: bool = True
    """Whether norms have gains."""
    names: PartNames = NAMES
    softcap: float | None = None
    """The bound of logits."""
    inner_norm: str | None = None
    """The checkpoint's name for a norm of an MLP's inner channels."""


def traits(config: LlamaConfig) -> Traits:
    """The traits of a config."""
    match config.model_type:
        case "exaone" | "internlm3" | "iquestcoder" | "llama" | "smollm3":
            own = config.attention_bias
            return Traits(AttentionForm(qkv_bias=own, out_bias=own), config.mlp_bias)
        case "apertus":
            own = config.attention_bias
            form = AttentionForm(own, own, norms="head")
            return Traits(form, mlp_names=UNGATED, names=APERTUS)
        case "nanochat":
            own, cap = config.attention_bias, config.final_logit_softcapping
            form = AttentionForm(own, own, norms="unit", normed_last=True)
            return Traits(form, mlp_names=("fc1", "fc2"), gains=False, softcap=cap)
        case "arcee":
            own = config.attention_bias
            form = AttentionForm(qkv_bias=own, out_bias=own)
            return Traits(form, config.mlp_bias, UNGATED)
        case "bitnet":
            own = config.attention_bias
            form = AttentionForm(own, own, inner_norm="attn_sub_norm")
            return Traits(form, inner_norm="ffn_sub_norm")
        case "cwm":
            return Traits(AttentionForm(), config.mlp_bias)
        case "ernie4_5":
            own = bool(config.use_bias)
            return Traits(AttentionForm(qkv_bias=own, out_bias=own), own)
        case "helium":
            return Traits(AttentionForm(qkv_bias=config.attention_bias), config.mlp_bias)
        case "hunyuan_v1_dense":
            own = config.attention_bias
            return Traits(AttentionForm(own, own, **HUNYUAN_NORMS))
        case "seed_oss":
            qkv, out = config.attention_bias, config.attention_out_bias
            return Traits(AttentionForm(qkv_bias=qkv, out_bias=out), config.mlp_bias)
        case "qwen2":
            return Traits(AttentionForm(qkv_bias=True))
        case "qwen3":
            own = config.attention_bias
            return Traits(AttentionForm(qkv_bias=own, out_bias=own, norms="head"))
        case "gemma":
            own, factor = config.attention_bias, config.hidden_size**0.5
            return Traits(AttentionForm(own, own), embedding=factor, unit_offset=True)
        case "granite":
            return multiplied(config, 1 / config.logits_scaling, config.mlp_bias)
        case "hyperclovax":
            return multiplied(config, config.logits_scaling, config.mlp_bias)
    return Traits(AttentionForm())


def multiplied(config: LlamaConfig, logits: float, mlp_bias: bool = False) -> Traits:
    """The traits of a Granite or of a HyperCLOVA X. `logits` is the factor on logits."""
    own = config.attention_bias
    return Traits(
        AttentionForm(qkv_bias=own, out_bias=own),
        mlp_bias,
        scores=config.attention_multiplier,
        embedding=config.embedding_multiplier,
        residual=config.residual_multiplier,
        logits=logits,
    )


def author(config: LlamaConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    own, scale, size = traits(config), options.scale, config.hidden_size
    kinds, added = layer_kinds(config, own.scores), scale * own.residual
    norm = Norms(config, scale, unit_offset=own.unit_offset, weight=own.gains)
    inner, eps = config.intermediate_size, config.rms_norm_eps
    block = BLOCKS.get(config.model_type, PreNormBlock)
    around = config.model_type == "hyperclovax" and config.use_post_norm
    after = partial(RMSNorm, size, eps, factor=added)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            factor = 1.0 if around else added  # behind a norm, its gains have the factor
            attention = Attention(size, eps, kind, own.form, factor)
            middle = None if own.inner_norm is None else (own.inner_norm, RMSNorm(inner, eps))
            mlp = MLP(
                size, inner, activation_of(config), own.mlp_bias, factor,
                names=own.mlp_names, inner_norm=middle,
            )  # fmt: skip
            if around:
                layers.append(SandwichBlock(index, attention, mlp, norm, after, AROUND))
            else:
                layers.append(block(index, norm(), attention, norm(), mlp, own.names))
        if isinstance(layers[0], NanochatBlock):
            layers[0].first = norm(factor=scale)
    return decoder_model(
        config, layers, scale, kinds, embedding=own.embedding, logits=own.logits,
        reach=reach(config), unit_offset=own.unit_offset, softcap=own.softcap,
        final=RMSNorm if own.gains else partial(RMSNorm, weight=False),
    )  # fmt: skip


def activation_of(config: LlamaConfig) -> str | XIELU:
    """The activation of an MLP: Apertus' own has parameters in each layer."""
    own = config.model_type == "apertus" and config.hidden_act == "xielu"
    return XIELU() if own else config.hidden_act


def reach(config: LlamaConfig) -> Reach:
    """The positions before a Ministral 3 multiplies its queries by a factor; of others, all."""
    positions = config.max_position_embeddings
    if config.model_type != "ministral3":
        return positions, None
    first = first_positions(config, positions)
    late = config.rope_parameters["llama_4_scaling_beta"]
    return (first, "multiplies queries by a factor") if late else (positions, None)


def check(config: LlamaConfig) -> None:
    """Raise CetaneError for what transformers cannot run: a BitNet whose heads are not as wide
    together as the residual stream, and a Ministral 3 without the numbers of its factor on late
    queries."""
    heads, size = config.num_attention_heads, config.hidden_size
    if config.model_type == "bitnet" and heads * (dim := heads_of(config).dim) != size:
        raise invalid("bitnet", f"{heads} heads of {dim} channels are not hidden_size = {size}")
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
    rotary = table(config, heads.dim)
    return [
        LayerKind(heads, rotary, window, positioned=positioned)
        for window, positioned in zip(layer_windows(config), positioned_layers(config), strict=True)
    ]


def table(config: LlamaConfig, dim: int) -> RotaryTable:
    """The rotary table of all layers. CetaneError for an `alpha` of Hunyuan that is no positive
    number: it stretches the base, whatever the type `dynamic` says elsewhere."""
    kind, rope = config.model_type, config.rope_parameters
    alpha = rope.get("alpha") if kind.startswith("hunyuan") else None
    if rope.get("rope_type") != "dynamic" or not alpha:
        part = rope.get("partial_rotary_factor") if kind in PARTLY_ROTARY else None
        return rotary_table(config, dim, part=part)
    if not isinstance(alpha, int | float) or not 0 < alpha <= LARGEST:
        raise invalid(kind, f"rope_parameters: alpha = {alpha!r}, not a positive number")
    return of_base(rope["rope_theta"] * alpha ** (dim / (dim - 2)), dim)


def positioned_layers(config: LlamaConfig) -> list[bool]:
    """Whether the queries and keys of each layer have positions. CetaneError if a SmolLM3 does not
    say it of all layers."""
    count = config.num_hidden_layers
    if config.model_type == "exaone_moe" and config.sliding_window is not None:
        return [layer_type == "sliding_attention" for layer_type in config.layer_types]
    if config.model_type != "smollm3":
        return [True] * count
    positioned = [bool(one) for one in config.no_rope_layers[:count]]
    check_entries("smollm3", "no_rope_layers", positioned, count)
    return positioned


def layer_windows(config: LlamaConfig) -> list[int | None]:
    """The attention window of every layer, in tokens; None for full attention. CetaneError if a
    layer slides and the config has no window."""
    if config.model_type in LAYERS_SLIDE:
        names = kind_names(config)
        return [config.sliding_window if name == "sliding" else None for name in names]
    windowed = config.model_type in ("ministral3", "mistral", "mixtral", "phi3", "qwen3_moe")
    return [config.sliding_window if windowed else None] * config.num_hidden_layers
