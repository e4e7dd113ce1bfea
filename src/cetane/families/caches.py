"""Key/value caches under each contract: the memory of attention between calls.

A shard stacks the keys of its layers into one tensor `(L, KV, D, S)`, and the values likewise. So
it has few inputs. Slots are the last axis, since the ANE aligns rows; states need a multiple of 32.
A layer calls `extend(k, v)` with its new columns `(1, KV, D, T)`; it gets the keys and values that
it may attend to.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cetane.families.grouped_query import KeysOrValues, Rounded, rounded
from cetane.schema.interface import (
    FromCache,
    Input,
    Output,
    Position,
    State,
    ToCache,
    WriteMask,
)
from cetane.schema.slots import CacheFormat, ContractName, Slots


@dataclass(frozen=True)
class CacheSpec:
    """A group of layers with equal caches inside one segment of a shard."""

    owner: str
    group: str
    layers: int
    heads: int
    dim: int
    slots: int
    form: "type[CacheForm]"
    state: State | None = None
    """The state that it shares with other groups, whose rows may be wider; None for its own."""
    first: int = 0
    """Its first row in that state."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.layers, self.heads, self.dim, self.slots)

    def scales(self, slots: int) -> tuple[int, int, int, int]:
        """The shape of the scales of rounded keys, or values, of some slots."""
        return (self.layers, self.heads, 1, slots)

    def names(self) -> Iterator[tuple[str, str]]:
        """The names of keys and of values: each in the graph, and in the manifest."""
        for part in ("k", "v"):
            yield f"{self.group}_{part}", f"{self.owner}.{self.group}_{part}"


class CacheForm(ABC):
    """A cache group while one function of a shard is traced or run."""

    contract: ClassVar[ContractName]

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        self.spec = spec
        self.k = tensors[f"{spec.group}_k"]
        self.v = tensors[f"{spec.group}_v"]
        self.written: list[tuple[Tensor, Tensor]] = []

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        """What a function of `tokens` tokens reads for the group."""
        return [
            Input(name=name, shape=spec.shape, source=FromCache(name=buffer, group=spec.group))
            for name, buffer in spec.names()
        ]

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        """What a function of `tokens` tokens gives back for the group."""
        return [
            Output(
                name=f"{name}_out",
                shape=spec.shape,
                sink=ToCache(name=buffer, group=spec.group, write="replace"),
            )
            for name, buffer in spec.names()
        ]

    @classmethod
    def states(cls, spec: CacheSpec) -> list[State]:
        return []

    def extend(self, k: Tensor, v: Tensor) -> tuple[KeysOrValues, KeysOrValues]:
        """Store a layer's new columns; return all keys and values that it may attend to."""
        layer = len(self.written)
        k, v = self.write(layer, self.k, k), self.write(layer, self.v, v)
        self.written.append((k, v))
        return k, v

    @abstractmethod
    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        """The layer's slots, with the new columns in their places."""

    def results(self) -> dict[str, Tensor]:
        """The graph outputs that carry the cache back to its owner."""
        k, v = zip(*self.written, strict=True)
        return {f"{self.spec.group}_k_out": torch.cat(k), f"{self.spec.group}_v_out": torch.cat(v)}


class ReadOnly(CacheForm):
    """The graph reads the past, concatenates the new columns and returns only those.

    The host writes them, so a refused draft leaves nothing to roll back. This is Apple's own rule
    for the ANE (coreai-models, neural_engine_rules.md). FluidInference/mobius #78
    measured that it runs there without errors.
    """

    contract = "readonly"

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        return [
            Output(
                name=f"{name}_out",
                shape=(*spec.shape[:3], tokens),
                sink=ToCache(name=buffer, group=spec.group, write="append"),
            )
            for name, buffer in spec.names()
        ]

    def extend(self, k: Tensor, v: Tensor) -> tuple[KeysOrValues, KeysOrValues]:
        layer = len(self.written)
        self.written.append((k, v))
        return self.write(layer, self.k, k), self.write(layer, self.v, v)

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        return torch.cat([cache[layer : layer + 1], new], dim=-1)


class RoundedReadOnly(ReadOnly):
    """As `ReadOnly`, but the host keeps whole numbers of 8 bits, and a scale for each token and
    head.

    The graph rounds its own new columns before it reads them. So a token sees the same keys,
    whether they are of its call or of an earlier one: a verified draft has the bits of plain
    decoding. The graph returns whole numbers in fp16; the host keeps them as int8, and rounds
    nothing.
    """

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        super().__init__(spec, tensors)
        self.k_scales = tensors[f"{spec.group}_k_scales"]
        self.v_scales = tensors[f"{spec.group}_v_scales"]
        self.rounded: list[tuple[Rounded, Rounded]] = []

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        codes = [item.model_copy(update={"dtype": "int8"}) for item in super().inputs(spec, tokens)]
        scales = [
            Input(
                name=f"{name}_scales",
                shape=spec.scales(spec.slots),
                source=FromCache(name=f"{buffer}_scales", group=spec.group),
            )
            for name, buffer in spec.names()
        ]
        return codes + scales

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        scales = [
            Output(
                name=f"{name}_scales_out",
                shape=spec.scales(tokens),
                sink=ToCache(name=f"{buffer}_scales", group=spec.group, write="append"),
            )
            for name, buffer in spec.names()
        ]
        return super().outputs(spec, tokens) + scales

    def extend(self, k: Tensor, v: Tensor) -> tuple[Rounded, Rounded]:
        layer, new = len(self.rounded), (rounded(k), rounded(v))
        self.rounded.append(new)
        return (
            self.join(layer, self.k, self.k_scales, new[0]),
            self.join(layer, self.v, self.v_scales, new[1]),
        )

    def join(self, layer: int, cache: Tensor, scales: Tensor, new: Rounded) -> Rounded:
        """The layer's slots, with the new columns after them."""
        past = cache[layer : layer + 1].to(new.codes.dtype)
        return Rounded(torch.cat([past, new.codes], dim=-1), self.write(layer, scales, new.scales))

    def results(self) -> dict[str, Tensor]:
        k, v = zip(*self.rounded, strict=True)
        group = self.spec.group
        return {
            f"{group}_{part}{ending}": torch.cat([getattr(one, held) for one in columns])
            for part, columns in (("k", k), ("v", v))
            for ending, held in (("_out", "codes"), ("_scales_out", "scales"))
        }


class Blend(CacheForm):
    """`cache * (1 - m) + new @ m` with a one-hot write mask: a scatter without a scatter op."""

    contract: ClassVar[ContractName] = "blend"

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        super().__init__(spec, tensors)
        self.mask = tensors[f"{spec.group}_write"]
        self.keep = 1 - self.mask.sum(2, keepdim=True)

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        write = Input(
            name=f"{spec.group}_write",
            shape=(1, 1, tokens, spec.slots),
            source=WriteMask(group=spec.group),
        )
        return [*super().inputs(spec, tokens), write]

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        return cache[layer : layer + 1] * self.keep + new @ self.mask


class Shift(CacheForm):
    """A sliding window: drops the oldest columns, and appends the new ones on the right."""

    contract: ClassVar[ContractName] = "shift"

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        return torch.cat([cache[layer : layer + 1, :, :, new.shape[-1] :], new], dim=-1)


class InState(CacheForm):
    """A group whose caches Core ML keeps: one MLState holds each layer's keys, then its values.

    If all groups share one state, a layer uses the first heads, channels and slots of its rows, and
    never touches the rest.
    """

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        self.spec, self.written = spec, []
        self.state = tensors[self.states(spec)[0].name]

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        return []

    @classmethod
    def outputs(cls, spec: CacheSpec, tokens: int) -> list[Output]:
        return []

    @classmethod
    def states(cls, spec: CacheSpec) -> list[State]:
        own = State(name=f"{spec.group}_kv", shape=(2 * spec.layers, *spec.shape[1:]))
        return [spec.state or own]

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        row = self.spec.first + 2 * len(self.written)
        self.written.append((k, v))
        return self.store(row, k), self.store(row + 1, v)

    def store(self, row: int, new: Tensor) -> Tensor:
        """Write new columns into a row of the state; return the row."""
        heads, dim, slots = self.spec.shape[1:]
        written = self.write(0, self.row(row), new)
        if self.spec.state is None:
            self.state[row : row + 1] = written
        else:
            self.state[row : row + 1, :heads, :dim, :slots] = written
        return written

    def row(self, row: int) -> Tensor:
        """The part of a row of the state that belongs to the group."""
        heads, dim, slots = self.spec.shape[1:]
        whole = self.state[row : row + 1]
        return whole if self.spec.state is None else whole[:, :heads, :dim, :slots]

    def results(self) -> dict[str, Tensor]:
        return {}


class Stateful(InState):
    """`slice_update` on an MLState, at a position.

    On the ANE, more than two states in a package fail, and so do other ways to write one. A
    function of several tokens may have only one (coremltools #2553, #2631; CoreML-LLM
    MLSTATE_PATTERN).
    """

    contract = "stateful"

    def __init__(self, spec: CacheSpec, tensors: dict[str, Tensor]) -> None:
        super().__init__(spec, tensors)
        self.start = tensors[f"{spec.group}_position"]

    @classmethod
    def inputs(cls, spec: CacheSpec, tokens: int) -> list[Input]:
        source = Position(group=spec.group)
        return [Input(name=f"{spec.group}_position", shape=(1,), dtype="int32", source=source)]

    def store(self, row: int, new: Tensor) -> Tensor:
        return self.write(row, self.state, new)

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        start, tokens = self.start, new.shape[-1]
        if self.spec.state is None:
            cache[layer : layer + 1, :, :, start : start + tokens] = new
            return cache[layer : layer + 1]
        _, heads, dim, slots = self.spec.shape
        cache[layer : layer + 1, :heads, :dim, start : start + tokens] = new
        return cache[layer : layer + 1, :heads, :dim, :slots]


class StatefulBlend(Blend, InState):
    """A state that a one-hot mask writes, as in the published port of ZAYA (ane-book, exp 30)."""

    contract = "stateful-blend"


class StatefulShift(Shift, InState):
    """A state that shifts, as in the published port of Gemma 4. On the ANE it is error -14."""

    contract = "stateful-shift"


CACHES: dict[ContractName, type[CacheForm]] = {
    form.contract: form for form in (ReadOnly, Blend, Shift, Stateful, StatefulBlend, StatefulShift)
}


def cache_form(slots: Slots, tokens: int, kept: CacheFormat) -> type[CacheForm]:
    """The class that reads and writes the caches of a group in a call of `tokens` tokens."""
    return RoundedReadOnly if kept == "int8" else CACHES[slots.contract_for(tokens)]
