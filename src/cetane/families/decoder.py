"""What decoders have in common: keys of their configs, and the model around their layers."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cetane.families.base import Block, CacheGroup, History, Matrix, Model, StoredTable
from cetane.families.options import residual_eps
from cetane.families.rotary import RotaryTable, longest
from cetane.schema.interface import Embedding, Rotary, Source


class DecoderConfig(Protocol):
    """The keys that are read from the config of every decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]


TURNS: dict[str, Source] = {
    "rope_cos": Rotary(table="default", part="cos"),
    "rope_sin": Rotary(table="default", part="sin"),
}
"""The host's rotary tensors of a decoder with one table."""


def decoder_model(
    config: DecoderConfig,
    layers: Sequence[Block],
    scale: float,
    host: Mapping[str, Source],
    memory: Mapping[str, CacheGroup | History | Matrix],
    rotary: dict[str, RotaryTable],
    channels: Mapping[str, int] = {},
    embedding: float = 1.0,
    logits: float = 1.0,
    unit_offset: bool = False,
) -> Model:
    """The model of some layers, whose residual stream is `scale` times transformers' own.

    `channels` are those of tensors between blocks, beside `hidden`; `embedding` and `logits` are
    factors.
    """
    table = "model.embed_tokens.weight"
    return Model(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=residual_eps(config.rms_norm_eps, scale),
        layers=tuple(layers),
        embedding=StoredTable(table, factor=scale * embedding),
        norm="model.norm.weight",
        output=table if config.tie_word_embeddings else "lm_head.weight",
        host={"hidden": Embedding(), **host},
        memory=memory,
        rotary=rotary,
        max_context=longest(config, config.max_position_embeddings),
        channels={"hidden": config.hidden_size, **channels},
        unit_offset=unit_offset,
        logit_factor=logits,
        residual_scale=scale,
    )
