"""Models whose norms are LayerNorms, which subtract the mean:

- Cohere and Cohere 2 (Command R) have attention and MLP beside each other, behind one norm without
  bias, and turn neighbouring channels. Full layers of Cohere 2 give queries and keys no positions;
- Falcon (7B, 40B, 2) has attention and MLP beside each other too, behind one norm or two, and no
  gates. It stores queries, keys and values as one tensor;
- GPT-NeoX (Pythia) and Persimmon store queries, keys and values as one tensor, and have no gates in
  their MLPs. GPT-NeoX has attention and MLP beside each other, behind a norm each;
- Jais 2 has no gates in its MLPs either;
- Nemotron (Minitron) has none, and stores gains less one;
- OLMo (of 2024) has norms without weights, and may bound queries, keys and values;
- Phi (1.5 and 2) has attention and MLP beside each other, behind one norm. Its head has biases;
- StableLM may have them so too;
- StarCoder2 has biases everywhere, and may have a window.

GPT-NeoX, Nemotron, Persimmon, Phi and StableLM give positions to some channels of a head only. The
truth is transformers' `modeling_{model_type}.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from cetane.families.attention import Attention, AttentionForm, normed_by
from cetane.families.base import Block
from cetane.families.blocks import NAMES, ParallelBlock, PartNames, PreNormBlock
from cetane.families.configs import invalid, unsupported
from cetane.families.decoder import TABLE, DecoderConfig, decoder_model, heads_of
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import LayerKind, kind_names
from cetane.families.layers import GATED, MLP, UNGATED, LayerNorm
from cetane.families.model import Model, StoredTable
from cetane.families.options import ResidualOptions, residual_eps
from cetane.families.rotary import rotary_table
from cetane.families.stored import HeadedBlock, HeadedParallelBlock, InterleavedParallelBlock

Options = ResidualOptions
MODEL_TYPES = (
    "cohere", "cohere2", "falcon", "gpt_neox", "jais2", "nemotron", "olmo", "persimmon", "phi",
    "stablelm", "starcoder2",
)  # fmt: skip
HEADED = ("gpt_neox", "persimmon")
"""The model types whose heads share no keys, whatever their configs say."""
OLMO_EPS = 1e-5
"""What OLMo's code has, and no config."""
ONE_NORM = PartNames(mlp_norm=NAMES.norm)
"""The names where attention and MLP read one norm."""
NEOX = PartNames(mixer="attention", layers="gpt_neox.layers")
"""GPT-NeoX's names."""
WIDER = ("dense_h_to_4h", "dense_4h_to_h")
"""Names for the projections of an MLP without a gate."""
PER_HEAD = ("q_layernorm", "k_layernorm")
"""Names for the norms of queries and keys."""

__all__ = ["MODEL_TYPES", "Options", "author"]


class LayerNormedConfig(DecoderConfig, Protocol):
    """The keys that are read from a config of one of `MODEL_TYPES`."""

    num_hidden_layers: int
    hidden_act: str
    layer_norm_eps: float
    norm_eps: float
    """Nemotron's."""
    norm_epsilon: float
    """StarCoder2's."""
    attention_bias: bool
    """Both Coheres, GPT-NeoX, Jais 2, Nemotron and OLMo have it."""
    clip_qkv: float | None
    """Only OLMo has it."""
    mlp_bias: bool
    """Jais 2 and Nemotron have it."""
    use_bias: bool
    """Only StarCoder2 has it."""
    use_qkv_bias: bool
    """Only StableLM has it."""
    use_parallel_residual: bool
    """GPT-NeoX and StableLM have it."""
    qk_layernorm: bool
    """Persimmon, Phi and StableLM have it."""
    use_qk_norm: bool
    """Only Cohere has it."""
    logit_scale: float | None
    """Cohere and Cohere 2 have it."""
    sliding_window: int | None
    """Cohere 2 and StarCoder2 have it."""
    layer_types: list[str]
    """Only Cohere 2 has it."""
    activation: str
    alibi: bool
    bias: bool
    ffn_hidden_size: int
    layer_norm_epsilon: float
    multi_query: bool
    new_decoder_architecture: bool
    num_kv_heads: int
    num_ln_in_parallel_attn: int | None
    parallel_attn: bool
    """Only Falcon has the last ten, in place of common keys."""


@dataclass(frozen=True)
class Traits:
    """What differs between the models."""

    form: AttentionForm
    eps: float
    block: type[PreNormBlock] = PreNormBlock
    names: PartNames = NAMES
    weight: bool = True
    bias: bool = True
    """Whether norms have weights, and biases."""
    unit_offset: bool = False
    """Whether the checkpoint stores the gains of norms less one."""
    mlp_bias: bool = False
    mlp_names: tuple[str, ...] = GATED
    whole: bool = False
    """Whether whole heads get positions, whatever the parameters say."""
    logits: float = 1.0
    table: str = TABLE
    norm: str = "model.norm.weight"
    """The names of the embedding and of the final norm."""
    output_bias: bool = False
    inner: str = "intermediate_size"
    act: str = "hidden_act"
    """The keys of the MLP's width and of its activation."""


def traits(config: LayerNormedConfig) -> Traits:
    """The traits of a config."""
    return TRAITS[config.model_type](config)


def form_of(config: LayerNormedConfig, **more: Any) -> AttentionForm:
    """Attention whose projections all have biases, or none. `more` are other fields of the form."""
    own = config.attention_bias
    return AttentionForm(own, own, **more)


def cohere(config: LayerNormedConfig) -> Traits:
    """Cohere, or Cohere 2. CetaneError for no factor on logits: transformers cannot run that."""
    if config.logit_scale is None:
        raise invalid(config.model_type, "logit_scale = None, not a number")
    normed = config.model_type == "cohere" and config.use_qk_norm
    return Traits(
        form_of(config, norms=normed_by("stacked", normed)),
        config.layer_norm_eps,
        InterleavedParallelBlock,
        ONE_NORM,
        bias=False,
        whole=True,
        logits=config.logit_scale,
    )


def falcon(config: LayerNormedConfig) -> Traits:
    """A Falcon. CetaneError for norms that transformers cannot run, and for ALiBi: there
    transformers rounds biases by absolute position to bfloat16, which no distance tells."""
    if config.alibi:
        raise unsupported(config.model_type, "alibi = True, positions by biases on scores")
    many, beside = config.new_decoder_architecture, config.parallel_attn
    count = config.num_ln_in_parallel_attn
    if many and (not beside or count not in (None, 1, 2)):
        raise invalid(config.model_type, "new_decoder_architecture = True without parallel norms")
    if beside and not many and count == 2:
        raise invalid(config.model_type, "num_ln_in_parallel_attn = 2, but an older architecture")
    names = PartNames(mixer="self_attention", layers="transformer.h")
    if many and count != 1:
        names = replace(names, norm="ln_attn", mlp_norm="ln_mlp")
    elif beside:
        names = replace(names, mlp_norm=names.norm)
    return Traits(
        AttentionForm(config.bias, config.bias, output="dense"),
        config.layer_norm_epsilon,
        HeadedParallelBlock if beside else HeadedBlock,
        names,
        mlp_bias=config.bias,
        mlp_names=WIDER,
        whole=True,
        table="transformer.word_embeddings.weight",
        norm="transformer.ln_f.weight",
        inner="ffn_hidden_size",
        act="activation",
    )


def gpt_neox(config: LayerNormedConfig) -> Traits:
    return Traits(
        form_of(config, output="dense"),
        config.layer_norm_eps,
        HeadedParallelBlock if config.use_parallel_residual else HeadedBlock,
        NEOX,
        mlp_bias=True,
        mlp_names=WIDER,
        table="gpt_neox.embed_in.weight",
        norm="gpt_neox.final_layer_norm.weight",
    )


def jais2(config: LayerNormedConfig) -> Traits:
    return Traits(
        form_of(config),
        config.layer_norm_eps,
        mlp_bias=config.mlp_bias,
        mlp_names=UNGATED,
        whole=True,
    )


def nemotron(config: LayerNormedConfig) -> Traits:
    return Traits(
        form_of(config),
        config.norm_eps,
        unit_offset=True,
        mlp_bias=config.mlp_bias,
        mlp_names=UNGATED,
    )


def olmo(config: LayerNormedConfig) -> Traits:
    form = form_of(config, clip=config.clip_qkv)
    return Traits(form, OLMO_EPS, weight=False, bias=False, whole=True)


def dense_form(config: LayerNormedConfig) -> AttentionForm:
    """Attention as Persimmon and Phi have it."""
    norms = normed_by("layer", config.qk_layernorm)
    return AttentionForm(True, True, norms, output="dense", normed=PER_HEAD)


def persimmon(config: LayerNormedConfig) -> Traits:
    return Traits(
        dense_form(config),
        config.layer_norm_eps,
        HeadedBlock,
        mlp_bias=True,
        mlp_names=WIDER,
        norm="model.final_layernorm.weight",
    )


def phi(config: LayerNormedConfig) -> Traits:
    return Traits(
        dense_form(config),
        config.layer_norm_eps,
        ParallelBlock,
        ONE_NORM,
        mlp_bias=True,
        mlp_names=("fc1", "fc2"),
        norm="model.final_layernorm.weight",
        output_bias=True,
    )


def stablelm(config: LayerNormedConfig) -> Traits:
    norms = normed_by("listed", config.qk_layernorm)
    form = AttentionForm(config.use_qkv_bias, norms=norms, normed=PER_HEAD)
    if config.use_parallel_residual:
        return Traits(form, config.layer_norm_eps, ParallelBlock, ONE_NORM)
    return Traits(form, config.layer_norm_eps)


def starcoder2(config: LayerNormedConfig) -> Traits:
    own = config.use_bias
    return Traits(
        AttentionForm(own, own),
        config.norm_epsilon,
        mlp_bias=own,
        mlp_names=("c_fc", "c_proj"),
        whole=True,
    )


TRAITS: dict[str, Callable[[LayerNormedConfig], Traits]] = {
    "cohere": cohere, "cohere2": cohere, "falcon": falcon, "gpt_neox": gpt_neox, "jais2": jais2,
    "nemotron": nemotron, "olmo": olmo, "persimmon": persimmon, "phi": phi, "stablelm": stablelm,
    "starcoder2": starcoder2,
}  # fmt: skip
"""The traits of each model type, which a config's numbers complete."""


def author(config: LayerNormedConfig, options: ResidualOptions) -> Model:
    """The model for a config of one of `MODEL_TYPES`."""
    check(config)
    own, scale, size = traits(config), options.scale, config.hidden_size
    kinds = layer_kinds(config, own.whole)
    inner, act = getattr(config, own.inner), getattr(config, own.act)
    final = partial(LayerNorm, weight=own.weight, bias=own.bias)
    norm = partial(final, size, residual_eps(own.eps, scale), unit_offset=own.unit_offset)
    layers: list[Block] = []
    with torch.device("meta"):
        for index, kind in enumerate(kinds):
            before = norm()
            attention = Attention(size, own.eps, kind, own.form, scale)
            mlp = MLP(size, inner, act, own.mlp_bias, scale, names=own.mlp_names)
            behind = before if own.names.norm == own.names.mlp_norm else norm()
            layers.append(own.block(index, before, attention, behind, mlp, own.names))
    return decoder_model(
        config, layers, scale, kinds, StoredTable(own.table, factor=scale), own.logits, own.norm,
        own.eps, final=final, unit_offset=own.unit_offset, output_bias=own.output_bias,
    )  # fmt: skip


def check(config: LayerNormedConfig) -> None:
    """Raise CetaneError for heads that transformers cannot run: those of some models are as wide
    together as the residual stream, and so are those of a Phi that norms them."""
    kind = config.model_type
    dim = own_heads(config).dim
    if kind in (*HEADED, "falcon", "stablelm") or (kind == "phi" and config.qk_layernorm):
        heads, size = config.num_attention_heads, config.hidden_size
        if heads * dim != size:
            raise invalid(kind, f"{heads} heads of {dim} channels are not hidden_size = {size}")


def own_heads(config: LayerNormedConfig) -> AttentionHeads:
    """The attention heads of a model."""
    if config.model_type == "falcon":
        return falcon_heads(config)
    return heads_of(config, shared=config.model_type not in HEADED)


def falcon_heads(config: LayerNormedConfig) -> AttentionHeads:
    """The attention heads of a Falcon. CetaneError for key heads that transformers cannot run."""
    query, kv = config.num_attention_heads, config.num_kv_heads
    dim = config.hidden_size // query
    if config.new_decoder_architecture:
        if query % kv:
            raise invalid(
                config.model_type,
                f"num_attention_heads = {query} is not a multiple of num_kv_heads = {kv}",
            )
    elif config.multi_query:
        kv = 1
    elif kv != query:
        raise invalid(config.model_type, f"num_kv_heads = {kv}, not {query}, as there are queries")
    return AttentionHeads(query, kv, dim, dim**-0.5)


def layer_kinds(config: LayerNormedConfig, whole: bool) -> list[LayerKind]:
    """The kind of every layer."""
    heads, count = own_heads(config), config.num_hidden_layers
    part = None if whole else config.rope_parameters.get("partial_rotary_factor", 1.0)
    rotary = rotary_table(config, heads.dim, part=part)
    if config.model_type != "cohere2":
        window = config.sliding_window if config.model_type == "starcoder2" else None
        return [LayerKind(heads, rotary, window)] * count
    kinds = {
        "sliding": LayerKind(heads, rotary, config.sliding_window, name="sliding"),
        "full": LayerKind(heads, rotary, name="full", positioned=False),
    }
    return [kinds[name] for name in kind_names(config)]
