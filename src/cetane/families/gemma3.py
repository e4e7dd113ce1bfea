"""Gemma 3, the text part: five sliding layers for each full one, normed queries and keys. And
Gemma 2: every second layer slides, and scores have a bound in place of those norms.

The truth is transformers' `modeling_gemma2.py` and `modeling_gemma3.py`. Checkpoints store gains
less one; one is added when they are read. Gemma 3's `attn_logit_softcapping` has no effect in
transformers, and none here.
"""

import torch

from cetane.families.base import Model, StoredTable
from cetane.families.gemma import (
    GemmaAttention,
    GemmaConfig,
    GemmaLayer,
    GemmaOptions,
    layer_kinds,
    make_kind,
)
from cetane.families.kinds import KINDS
from cetane.families.layers import AttentionHeads
from cetane.families.options import residual_eps
from cetane.schema.interface import Embedding

Options = GemmaOptions
MODEL_TYPES = ("gemma2", "gemma3_text")

__all__ = ["MODEL_TYPES", "Options", "author"]


class Gemma3Config(GemmaConfig):
    """The keys that are read from a Gemma2Config or Gemma3TextConfig."""

    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None


def author(config: Gemma3Config, options: GemmaOptions) -> Model:
    """The model of a Gemma2Config or Gemma3TextConfig."""
    older = config.model_type == "gemma2"
    scale, eps, size = options.scale, config.rms_norm_eps, config.hidden_size
    names = layer_kinds(config)
    kinds = {}
    for layer_type in dict.fromkeys(config.layer_types):
        heads = AttentionHeads(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.query_pre_attn_scalar**-0.5,
            options.full_block if layer_type == "full_attention" else None,
            config.attn_logit_softcapping if older else None,
        )
        kinds[KINDS[layer_type]] = make_kind(config, config, layer_type, heads, options)
    with torch.device("meta"):
        layers = []
        for index, name in enumerate(names):
            heads = kinds[name].heads
            attention = GemmaAttention(size, heads, config.attention_bias, eps, True, not older)
            inner = config.intermediate_size
            layers.append(
                GemmaLayer(config, index, kinds[name], attention, inner, unit=True, scale=scale)
            )
    table = "model.embed_tokens.weight"
    return Model(
        hidden=size,
        vocab=config.vocab_size,
        eps=residual_eps(eps, scale),
        layers=tuple(layers),
        embedding=StoredTable(table, factor=size**0.5 * scale),
        norm="model.norm.weight",
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host={"hidden": Embedding()} | {n: s for k in kinds.values() for n, s in k.host().items()},
        memory={name: kind.group() for name, kind in kinds.items()},
        rotary={name: kind.rotary for name, kind in kinds.items()},
        max_context=config.max_position_embeddings,
        channels={"hidden": size},
        unit_offset=True,
        residual_scale=scale,
        softcap=config.final_logit_softcapping,
    )
