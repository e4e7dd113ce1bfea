"""Gemma 3, the text part: five sliding layers to a full one, normed queries and keys.

Truth is transformers' `modeling_gemma3.py`. Gains are stored less one, and become gains when they
are read. `attn_logit_softcapping` has no effect there, and none here.

The residual streams of released models grow beyond fp16. What is added to them is normed before,
and all that reads them is normed first, so the whole stream can be smaller by a constant.
"""

from typing import Any

import torch
from pydantic import Field

from cetane.families.base import EmbeddingTable, Model, Weights
from cetane.families.gemma import (
    KINDS,
    Attention,
    Layer,
    layer_kinds,
    make_kind,
    residual_eps,
)
from cetane.families.gemma import Options as Common
from cetane.families.layers import Heads
from cetane.schema.interface import Embedding, Order

MODEL_TYPES = ("gemma3_text",)


class Options(Common):
    """The `[family]` table of a recipe."""

    residual_scale: float = Field(default=1.0, gt=0, le=1)
    """The residual stream is the model's times this; a power of two is exact."""


def author(config: Any, order: Order, options: Options, weights: Weights) -> Model:
    """The model of a Gemma3TextConfig."""
    scale = options.residual_scale
    names = layer_kinds(config)
    kinds = {}
    for layer_type in dict.fromkeys(config.layer_types):
        heads = Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            config.query_pre_attn_scalar**-0.5,
            order,
            options.full_block if layer_type == "full_attention" else None,
        )
        kinds[KINDS[layer_type]] = make_kind(config, config, layer_type, heads, options)
    with torch.device("meta"):
        layers = tuple(
            Layer(
                config,
                index,
                kinds[name],
                Attention(
                    config.hidden_size,
                    kinds[name].heads,
                    config.attention_bias,
                    config.rms_norm_eps,
                    unit=True,
                ),
                config.intermediate_size,
                unit=True,
                scale=scale,
            )
            for index, name in enumerate(names)
        )
    table = "model.embed_tokens.weight"
    return Model(
        order=order,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=residual_eps(config.rms_norm_eps, scale),
        layers=layers,
        embedding=EmbeddingTable(table, factor=config.hidden_size**0.5 * scale),
        norm="model.norm.weight",
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host={"hidden": Embedding()} | {n: s for k in kinds.values() for n, s in k.host().items()},
        memory={name: kind.group() for name, kind in kinds.items()},
        rotary={name: kind.rotary for name, kind in kinds.items()},
        max_context=config.max_position_embeddings,
        channels={"hidden": config.hidden_size},
        unit_offset=True,
        residual_scale=scale,
        softcap=config.final_logit_softcapping,
    )
