"""Layers: a mixer of tokens, and an MLP or experts behind it."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from cetane.families.base import Block, Flow, Memory, Spaces, Truth, ValueSpace
from cetane.families.layers import MLP, Exchange, LayerNorm, Norm, RMSNorm


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
    layers: str = "model.layers"
    """The checkpoint's name for the list of layers."""


NAMES = PartNames()
"""The names in most checkpoints."""


class PreNormBlock(Block):
    """A mixer, and perhaps an MLP, each behind a norm. The residual stream may be scaled."""

    def __init__(
        self,
        index: int,
        norm: Norm,
        mixer: Mixer,
        mlp_norm: Norm | None = None,
        mlp: MLP | None = None,
        names: PartNames = NAMES,
        alone: str = "attn",
    ) -> None:
        """`alone` is the block's name without an MLP."""
        name = f"{alone if mlp is None else 'layer'}-{index:02}"
        super().__init__(name, index, f"{names.layers}.{index}.")
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
        h = h + self.mixed(self.part(names.norm)(h), flow, memory)
        if self.with_mlp:
            h = h + self.part(names.mlp)(self.part(names.mlp_norm)(h))
        flow["hidden"] = h

    def mixed(self, x: Tensor, flow: Flow, memory: Memory) -> Tensor:
        """What the mixer adds, of normed `x`."""
        made: Tensor = self.part(self.names.mixer)(x, flow, memory)
        return made

    def plain(self, norm: str) -> bool:
        """Whether a norm has gains, and the checkpoint stores them as they are."""
        gains = self.part(norm).held.get("weight")
        return gains is not None and gains.pick is None

    def behind(self) -> dict[str, tuple[str, ...]]:
        """The parts that read each norm: two, if both read the same."""
        names, made = self.names, dict[str, tuple[str, ...]]()
        parts = [(names.norm, names.mixer), (names.mlp_norm, names.mlp)][: 1 + self.with_mlp]
        for norm, name in parts:
            made[norm] = (*made.get(norm, ()), name)
        return made

    def readers(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """The projections of the inputs of some parts; empty if others must not change them all."""
        each = [under(name, self.part(name).readers) for name in parts]
        return tuple(chain(*each)) if all(each) else ()

    def exchanges(self) -> tuple[Exchange, ...]:
        made = list[Exchange]()
        for norm, parts in self.behind().items():
            readers = self.readers(parts)
            if readers and self.plain(norm):
                for name in parts:
                    made += [within(name, one) for one in self.part(name).exchanges()]
                made.append(Exchange(readers, under(norm, ("weight", "bias"))))
        return tuple(made)

    def spaces(self) -> Spaces | None:
        """Only values turn behind a LayerNorm: no rotation keeps the mean that it subtracts, and
        its bias has no place in readers without biases."""
        names, mixer = self.names, self.part(self.names.mixer)
        if isinstance(self.part(names.norm), LayerNorm):
            return Spaces(values=values_within(names.mixer, mixer))
        if not self.with_mlp or not mixer.readers or not self.plain(names.norm):
            return None
        behind = self.behind()
        return Spaces(
            tuple(f"{name}.{self.part(name).writer}" for name in chain(*behind.values())),
            {norm: self.readers(parts) for norm, parts in behind.items()},
            values_within(names.mixer, mixer),
        )


class ParallelBlock(PreNormBlock):
    """A mixer and an MLP that both read what comes into the layer, behind a norm each, or behind
    the same one: then `names` has it twice."""

    def forward(self, flow: Flow, memory: Memory) -> None:
        names, h = self.names, flow["hidden"]
        x = y = self.part(names.norm)(h)
        if names.mlp_norm != names.norm:
            y = self.part(names.mlp_norm)(h)
        mixed = h + self.part(names.mixer)(x, flow, memory)
        flow["hidden"] = mixed + self.part(names.mlp)(y)


@dataclass(frozen=True)
class SandwichNames(PartNames):
    """The checkpoint's names for the parts of a layer with norms on both sides."""

    after: str = "post_attention_layernorm"
    """The norm of what the mixer gives."""
    mlp_norm: str = "pre_feedforward_layernorm"
    mlp_after: str = "post_feedforward_layernorm"


class SandwichBlock(PreNormBlock):
    """A mixer, and perhaps an MLP, each normed before and after.

    The residual stream may be `scale` times the model's. The norms before undo the factor, and the
    gains of the norms after include it.
    """

    names: SandwichNames

    def __init__(
        self,
        index: int,
        mixer: Mixer,
        mlp: MLP | None,
        before: Callable[[], RMSNorm],
        after: Callable[[], RMSNorm],
        names: SandwichNames = SandwichNames(),
    ) -> None:
        """`before` and `after` make norms of the two sides."""
        super().__init__(index, before(), mixer, before() if mlp else None, mlp, names)
        self.add_module(names.after, after())
        if mlp is not None:
            self.add_module(names.mlp_after, after())

    def spaces(self) -> Spaces | None:
        """Only values turn: norms make what is added to the residual stream."""
        return Spaces(values=values_within(self.names.mixer, self.part(self.names.mixer)))

    def forward(self, flow: Flow, memory: Memory) -> None:
        names, h = self.names, flow["hidden"]
        x = self.part(names.mixer)(self.part(names.norm)(h), flow, memory)
        h = h + self.part(names.after)(x)
        if self.with_mlp:
            x = self.part(names.mlp)(self.part(names.mlp_norm)(h))
            h = h + self.part(names.mlp_after)(x)
        flow["hidden"] = h


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
