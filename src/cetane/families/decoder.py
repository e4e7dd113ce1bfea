"""What decoders have in common: keys of their configs, and the model around their layers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cetane.families.base import Block
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import LayerKind
from cetane.families.layers import RMSNorm
from cetane.families.model import CacheGroup, History, Matrix, Model, Reach, StoredTable
from cetane.families.options import residual_eps
from cetane.families.rotary import first_positions
from cetane.schema.interface import Embedding, Source

TABLE = "model.embed_tokens.weight"


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


@dataclass(frozen=True, kw_only=True)
class Multipliers:
    """Factors of a model that has some, as Granite and MiniCPM3."""

    embedding: float = 1.0
    residual: float = 1.0
    """The factor on what attention and MLP add."""
    logits: float = 1.0


def heads_of(
    config: DecoderConfig, factor: float | None = None, shared: bool = True, **more: Any
) -> AttentionHeads:
    """The attention heads of a config.

    `factor` is that on scores, None for one over the root of a head's width. Without `shared`, each
    query head has keys of its own, whatever the config says. `more` are other fields of
    `AttentionHeads`.
    """
    query = config.num_attention_heads
    kv = config.num_key_value_heads if shared else query
    dim = getattr(config, "head_dim", None) or config.hidden_size // query
    factor = dim**-0.5 if factor is None else factor
    return AttentionHeads(query, kv, dim, factor, **more)


def decoder_model(
    config: DecoderConfig,
    layers: Sequence[Block],
    scale: float | None,
    kinds: Iterable[LayerKind],
    embedding: float | StoredTable = 1.0,
    logits: float = 1.0,
    norm: str = "model.norm.weight",
    eps: float | None = None,
    reach: Reach | None = None,
    host: Mapping[str, Source] = {},
    memory: Mapping[str, CacheGroup | History | Matrix] = {},
    channels: Mapping[str, int] = {},
    **more: Any,
) -> Model:
    """The model of some layers, whose residual stream is `scale` times transformers' own; None for
    a family without that option.

    `kinds` are the kinds of its layers. `host` and `memory` are what the model has beside the
    kinds' tensors and caches; `channels` are those of tensors beside `hidden`. `embedding` is a
    factor or a table, `logits` a factor. `norm` and `eps` are the last norm's. `reach` is
    where a context ends, by default where training did. `more` are other fields of `Model`.
    """
    positions, beyond = (config.max_position_embeddings, None) if reach is None else reach
    kinds, factor = tuple(kinds), 1.0 if scale is None else scale
    positioned = any(kind.positioned for kind in kinds)
    rope = getattr(config, "rope_parameters", {})  # Nemotron-H has no positions
    if positioned and rope.get("rope_type") == "longrope":
        # A text that grows into the second table would need new positions for all of its keys.
        positions, beyond = first_positions(config, positions), "has other rotary tables"
    made: dict[str, Source] = {"hidden": Embedding()}
    for kind in kinds:
        made |= kind.host()
    if isinstance(embedding, float | int):
        embedding = StoredTable(TABLE, factor=factor * embedding)
    return Model(
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=residual_eps(config.rms_norm_eps if eps is None else eps, factor),
        layers=tuple(layers),
        embedding=embedding,
        norm=norm,
        output=embedding.weight if config.tie_word_embeddings else "lm_head.weight",
        host={**made, **host},
        memory={**{kind.name: kind.group() for kind in kinds}, **memory},
        rotary={kind.table: kind.rotary for kind in kinds if kind.positioned},
        max_context=positions,
        beyond=beyond,
        channels={"hidden": config.hidden_size, **channels},
        logit_factor=logits,
        residual_scale=scale,
        **more,
    )


class Norms:
    """Makes the norms of layers whose residual stream is `scale` times the model's."""

    def __init__(self, config: DecoderConfig, scale: float, **more: Any) -> None:
        self.size, self.more = config.hidden_size, more
        self.eps = residual_eps(config.rms_norm_eps, scale)

    def __call__(self, **more: Any) -> RMSNorm:
        return RMSNorm(self.size, self.eps, **self.more, **more)
