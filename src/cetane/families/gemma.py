"""The common part of Gemma 2, 3 and 4: sliding and full layers.

Each of the two kinds has its own caches and masks, and from Gemma 3 on its own rotary base. Norms
stand before and after attention and MLP.
"""

from functools import partial
from typing import Protocol, Self

from pydantic import Field, model_validator

from cetane.families.attention import Attention
from cetane.families.blocks import SandwichBlock
from cetane.families.decoder import DecoderConfig, Norms
from cetane.families.grouped_query import AttentionHeads
from cetane.families.kinds import KINDS, LayerKind
from cetane.families.layers import MLP, Exchange, RMSNorm
from cetane.families.options import ResidualOptions
from cetane.families.rotary import RotaryConfig, rotary_table


class GemmaConfig(DecoderConfig, Protocol):
    """The keys that are read from the config of every Gemma."""

    head_dim: int
    hidden_activation: str
    attention_bias: bool
    layer_types: list[str]
    sliding_window: int | None
    final_logit_softcapping: float | None


class GemmaOptions(ResidualOptions):
    """The `[family]` table of a recipe: limits on the layers with full attention."""

    full_window: int | None = Field(default=None, ge=1)
    """The number of last tokens that full layers see; their caches are as short ("WFA" in the
    published ports). None for all tokens."""
    sinks: int = Field(default=0, ge=0)
    """The number of first tokens that they see beside the window (arXiv 2309.17453)."""
    full_block: int | None = Field(default=None, ge=1)
    """The number of keys that they take at a time ("flash decoding"). None for all keys."""

    @model_validator(mode="after")
    def consistent(self) -> Self:
        if self.sinks and self.full_window is None:
            raise ValueError("sinks needs full_window: without it, layers see all tokens")
        return self


def make_kind(
    config: GemmaConfig,
    of: RotaryConfig,
    layer_type: str,
    heads: AttentionHeads,
    options: GemmaOptions,
) -> LayerKind:
    """A kind of layers; `of` is the config of one such layer."""
    typed = config.model_type not in ("gemma2", "vaultgemma")
    full, name = layer_type == "full_attention", KINDS[layer_type]
    return LayerKind(
        heads,
        # transformers turns whole heads; of `proportional`, some pairs by an angle of 0
        rotary_table(of, heads.dim, layer_type if typed else None, part=1.0),
        window=options.full_window if full else config.sliding_window,
        sinks=options.sinks if full else 0,
        name=name,
        table=name,
    )


class GemmaLayer(SandwichBlock):
    """Attention and MLP, each normed before and after."""

    def __init__(
        self,
        config: GemmaConfig,
        index: int,
        attention: Attention,
        inner: int,
        unit: bool,
        scale: float = 1.0,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        mlp = MLP(size, inner, config.hidden_activation)
        before = Norms(config, scale, unit_offset=unit)
        after = partial(RMSNorm, size, eps, unit_offset=unit, factor=scale)
        super().__init__(index, attention, mlp, before, after)

    def exchanges(self) -> tuple[Exchange, ...]:
        """None: a checkpoint may store gains less one, and layers may share values."""
        return ()
