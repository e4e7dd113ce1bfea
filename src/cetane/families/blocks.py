"""Layers: a mixer of tokens, and an MLP or experts behind it."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from cetane.families.base import Block, Flow, Memory, Spaces, Truth, ValueSpace
from cetane.families.layers import MLP, Exchange, RMSNorm


class Mixer(nn.Module):
    """Attention, or what stands in its place."""

    reads: tuple[str, ...] = ()
    """The names of the host's tensors that it reads."""
    keeps: tuple[str, ...] = ()
    """The names of the memory that it extends."""
    readers: tuple[str, ...] = ()
    """The projections of its input; empty if others must not change them."""
    writer: str = ""
    """The projection that makes its output."""

    def exchanges(self) -> tuple[Exchange, ...]:
        """See `Block.exchanges`, by paths of its own."""
        return ()

    def value_space(self) -> ValueSpace | None:
        """See `Spaces.values`, by paths of its own; None if no rotation may turn values."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor: ...


@dataclass(frozen=True)
class PartNames:
    """The checkpoint's names for the parts of a layer."""

    norm: str = "input_layernorm"
    mixer: str = "self_attn"
    mlp_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


NAMES = PartNames()
"""The names in most checkpoints."""


class PreNormBlock(Block):
    """A mixer, and perhaps an MLP, each behind a norm. The residual stream may be scaled."""

    def __init__(
        self,
        index: int,
        norm: RMSNorm,
        mixer: Mixer,
        mlp_norm: RMSNorm | None = None,
        mlp: MLP | None = None,
        names: PartNames = NAMES,
        alone: str = "attn",
    ) -> None:
        """`alone` is the block's name without an MLP."""
        name = f"{alone if mlp is None else 'layer'}-{index:02}"
        super().__init__(name, index, f"model.layers.{index}.")
        self.names, self.with_mlp = names, mlp is not None
        self.reads, self.keeps = ("hidden", *mixer.reads), mixer.keeps
        self.add_module(names.norm, norm)
        self.add_module(names.mixer, mixer)
        if mlp is not None:
            self.add_module(names.mlp_norm, mlp_norm)
            self.add_module(names.mlp, mlp)

    def part(self, name: str) -> Any:
        return self.get_submodule(name)

    def truths(self) -> dict[str, Truth]:
        """No module of transformers gives the sum after a mixer."""
        return super().truths() if self.with_mlp else {}

    def forward(self, flow: Flow, memory: Memory) -> None:
        names, h = self.names, flow["hidden"]
        h = h + self.part(names.mixer)(self.part(names.norm)(h), flow, memory)
        if self.with_mlp:
            h = h + self.part(names.mlp)(self.part(names.mlp_norm)(h))
        flow["hidden"] = h

    def plain(self, norm: str) -> bool:
        """Whether the checkpoint stores a norm's gains as they are."""
        return self.part(norm).held["weight"].pick is None

    def exchanges(self) -> tuple[Exchange, ...]:
        names, made = self.names, list[Exchange]()
        parts = [(names.norm, names.mixer), (names.mlp_norm, names.mlp)][: 1 + self.with_mlp]
        for norm, name in parts:
            part = self.part(name)
            if part.readers and self.plain(norm):
                made += [within(name, one) for one in part.exchanges()]
                made.append(Exchange(under(name, part.readers), (f"{norm}.weight",)))
        return tuple(made)

    def spaces(self) -> Spaces | None:
        names, mixer = self.names, self.part(self.names.mixer)
        if not self.with_mlp or not mixer.readers or not self.plain(names.norm):
            return None
        mlp = self.part(names.mlp)
        return Spaces(
            (*under(names.mixer, (mixer.writer,)), *under(names.mlp, (mlp.writer,))),
            {
                names.norm: under(names.mixer, mixer.readers),
                names.mlp_norm: under(names.mlp, mlp.readers),
            },
            values_within(names.mixer, mixer),
        )


@dataclass(frozen=True)
class SandwichNames(PartNames):
    """The checkpoint's names for the parts of a layer with norms on both sides."""

    after: str = "post_attention_layernorm"
    """The norm of what the mixer gives."""
    mlp_norm: str = "pre_feedforward_layernorm"
    mlp_after: str = "post_feedforward_layernorm"


class SandwichBlock(PreNormBlock):
    """A mixer and an MLP, each normed before and after.

    The residual stream may be `scale` times the model's. The norms before undo the factor, and the
    gains of the norms after include it.
    """

    names: SandwichNames

    def __init__(
        self,
        index: int,
        mixer: Mixer,
        mlp: MLP,
        before: Callable[[], RMSNorm],
        after: Callable[[], RMSNorm],
        names: SandwichNames = SandwichNames(),
    ) -> None:
        """`before` and `after` make norms of the two sides."""
        super().__init__(index, before(), mixer, before(), mlp, names)
        self.add_module(names.after, after())
        self.add_module(names.mlp_after, after())

    def spaces(self) -> Spaces | None:
        """Only values turn: norms make what is added to the residual stream."""
        return Spaces(values=values_within(self.names.mixer, self.part(self.names.mixer)))

    def forward(self, flow: Flow, memory: Memory) -> None:
        names, h = self.names, flow["hidden"]
        x = self.part(names.mixer)(self.part(names.norm)(h), flow, memory)
        h = h + self.part(names.after)(x)
        x = self.part(names.mlp)(self.part(names.mlp_norm)(h))
        flow["hidden"] = h + self.part(names.mlp_after)(x)


def under(module: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Paths of a module's parts, as paths of the block's."""
    return tuple(f"{module}.{path}" for path in paths)


def values_within(module: str, mixer: Mixer) -> ValueSpace | None:
    """A mixer's space of values, as the block's; None if no rotation may turn values."""
    own = mixer.value_space()
    if own is None:
        return None
    maker, reader = under(module, (own.maker, own.reader))
    return ValueSpace(maker, reader, own.width)


def within(module: str, exchange: Exchange) -> Exchange:
    """A module's own exchange, as the block's."""
    readers, writers = under(module, exchange.readers), under(module, exchange.writers)
    return Exchange(readers, writers, exchange.channels)
