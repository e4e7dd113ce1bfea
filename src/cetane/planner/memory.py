"""The memory of a plan: slots, cache groups, histories and states, and their bytes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from math import prod
from typing import Self

from cetane.errors import CetaneError
from cetane.families import (
    Block,
    CacheForm,
    CacheGroup,
    CacheSpec,
    History,
    HistorySpec,
    Matrix,
    MatrixSpec,
    Model,
    cache_form,
)
from cetane.planner.layout import Segment
from cetane.schema.interface import Mask, State
from cetane.schema.recipe import Recipe
from cetane.schema.slots import PADDED, Slots


class CachePlan:
    """The caches and histories of a model under one recipe.

    A planner for another runtime subclasses it. `form` decides how a call reads and writes a group;
    `visible` gives the number of keys that it sees.
    """

    def __init__(self, model: Model, recipe: Recipe, source: str) -> None:
        """`source` names the checkpoint in errors. Raises CetaneError for contracts that do not fit
        the model."""
        self.model, self.recipe, self.source = model, recipe, source
        self.groups = {
            name: group for name, group in model.memory.items() if isinstance(group, CacheGroup)
        }
        self.slots = self.slots_for(recipe.cache.context)
        self._check()

    def slots_for(self, context: int) -> dict[str, Slots]:
        """The slots of every group at a context length."""
        return {name: self._slots(group, context) for name, group in self.groups.items()}

    def at(self, context: int) -> Self:
        """The same caches at another context. At a smaller one, windows keep their slots."""
        view = copy(self)
        view.slots = (
            self.slots_for(context)
            if context > self.recipe.cache.context
            else {name: slots.at(context) for name, slots in self.slots.items()}
        )
        return view

    def _slots(self, group: CacheGroup, context: int) -> Slots:
        """The slots of a group. Their number is a multiple of 32, to which the ANE aligns rows."""
        cache = self.recipe.cache
        if group.window is None:
            return Slots(contract=cache.contract, count=context)
        contract = cache.sliding or cache.contract
        if not cache.windowed:
            return Slots(contract=contract, count=context)
        need = group.sinks + group.window
        if contract.startswith("stateful"):  # a call writes its tokens before the first one reads
            need += max(self.recipe.tokens.by_mode().values()) - 1
        count = min(context, -(-need // 32) * 32)
        limited = count < context
        return Slots(
            contract=contract,
            count=count,
            limited=limited,
            sinks=group.sinks if limited else 0,
        )

    def _check(self) -> None:
        """Raise CetaneError for a contract that cannot work with the model's windows, and for
        shapes that cannot work with its matrices."""
        matrices = any(isinstance(kept, Matrix) for kept in self.model.memory.values())
        if matrices and self.recipe.tokens.shapes == "range":
            raise CetaneError(
                f"tokens.shapes = 'range': layers of {self.source} keep matrices, whose graphs "
                "depend on the number of tokens",
                "use static shapes",
            )
        if self.recipe.cache.format == "int8":
            self._check_int8()
        if self.recipe.cache.sliding is not None:
            self._check_sliding()
        for name, slots in self.slots.items():
            self._check_slots(name, slots)

    def _check_sliding(self) -> None:
        """Raise CetaneError for a model without caches of windows, of which `cache.sliding` is the
        contract."""
        if any(group.window for group in self.groups.values()):
            return
        masked = any(isinstance(s, Mask) and s.window for s in self.model.host.values())
        why = (
            f"all layers of {self.source} share one kind of cache, as long as the context"
            if masked
            else f"no layers of {self.source} see only a window"
        )
        raise CetaneError(f"cache.sliding: {why}", "leave cache.sliding out")

    def _check_slots(self, name: str, slots: Slots) -> None:
        """Raise CetaneError for slots that the recipe's calls of a group cannot use."""
        recipe = self.recipe
        several = len(recipe.tokens.by_mode()) > 1 or recipe.cache.capacities
        if slots.contract == "stateful-shift" and several:
            raise CetaneError(
                f"a state that shifts can neither take back a refused draft nor grow, so "
                f"layers of {name} take one token a call, at one capacity",
                "port with --set tokens.verify=0 --set tokens.prefill=0 "
                "--set 'cache.capacities=[]'",
            )
        # One token and several have other inputs, and a flexible shape has one graph.
        changes = slots.contract_for(2) != slots.contract
        if changes and recipe.tokens.shapes == "range":
            raise CetaneError(
                f"tokens.shapes = 'range': a {slots.contract} cache of a window needs other "
                "inputs for one token than for several",
                "use static shapes, or a readonly cache",
            )
        if slots.shifts and slots.sinks:
            raise CetaneError(
                f"a shift cache forgets the first tokens, which layers of {name} must see",
                "set cache.sliding to another contract",
            )

    def _check_int8(self) -> None:
        """Raise CetaneError for a model without keys and values that can be int8."""
        why = "its layers keep no keys and values"
        if any(group.latent for group in self.groups.values()):
            why = "its layers keep latents, of which keys and values are made"
        elif self.groups:
            return
        raise CetaneError(
            f"cache.format = 'int8': {self.source} has no such caches: {why}",
            "port with --set cache.format=fp16",
        )

    def form(self, group: str, tokens: int) -> type[CacheForm]:
        """How a call of `tokens` tokens reads and writes the caches of a group."""
        return cache_form(self.slots[group], tokens, self.recipe.cache.format)

    def visible(self, group: str, tokens: int) -> int:
        """The number of keys of a group that a call of `tokens` tokens sees."""
        return self.slots[group].visible(tokens)

    def caches(self, segment: Segment, tokens: int) -> tuple[CacheSpec, ...]:
        """The cache groups of a segment, for a call of `tokens` tokens."""
        shared = self._shared_shape(segment.blocks, self.slots)
        state = None if shared is None else State(name=PADDED, shape=shared)
        rows = dict(self._rows(segment.blocks))
        return tuple(
            CacheSpec(
                owner=segment.owner,
                group=name,
                layers=layers,
                heads=self.groups[name].heads,
                dim=self.groups[name].dim,
                slots=self.slots[name].count,
                form=self.form(name, tokens),
                state=state,
                first=rows[name] if state else 0,
            )
            for name, layers in self._kept_groups(segment.blocks).items()
        )

    def histories(self, segment: Segment) -> tuple[HistorySpec | MatrixSpec, ...]:
        """The histories and matrices of a segment."""
        specs: list[HistorySpec | MatrixSpec] = []
        for name, layers in _kept(segment.blocks).items():
            match self.model.memory[name]:
                case History(channels, length):
                    specs.append(
                        HistorySpec(segment.owner, name, layers, channels, length, self.model.axes)
                    )
                case Matrix(heads, keys, values, groups):
                    specs.append(
                        MatrixSpec(
                            segment.owner, name, layers, heads, keys, values, groups,
                            self.model.axes,
                        )
                    )  # fmt: skip
        return tuple(specs)

    def nbytes(self, segments: Sequence[Segment], context: int) -> int:
        """Bytes of the whole model's keys and values, with their scales and the padding of
        states."""
        slots = self.slots_for(context)
        states = [self._shared_shape(segment.blocks, slots) for segment in segments]
        padded = sum(2 * prod(shape) for shape in states if shape is not None)
        return padded or self.own_nbytes(context)

    def own_nbytes(self, context: int) -> int:
        """Bytes of the whole model's keys and values, with their scales, without padding."""
        return self._nbytes_of(self.slots_for(context))

    def growing_nbytes(self, capacity: int) -> int:
        """Bytes of the keys and values that grow with the capacity, with their scales, without
        padding."""
        slots = self.at(capacity).slots
        return self._nbytes_of({name: one for name, one in slots.items() if not one.limited})

    def _nbytes_of(self, slots: Mapping[str, Slots]) -> int:
        return sum(
            2 * self.head_nbytes(name) * self.groups[name].heads * slots[name].count * layers
            for name, layers in self._kept_groups(self.model.layers).items()
            if name in slots
        )

    def head_nbytes(self, group: str) -> int:
        """Bytes of the keys, or the values, that one head keeps of one token."""
        dim = self.groups[group].dim
        return dim + 2 if self.recipe.cache.format == "int8" else 2 * dim

    def _kept_groups(self, blocks: Sequence[Block]) -> dict[str, int]:
        """The number of blocks that keep a cache of each group."""
        return {name: count for name, count in _kept(blocks).items() if name in self.groups}

    def _rows(self, blocks: Sequence[Block]) -> Iterator[tuple[str, int]]:
        """The name of each group, and its first row in a state that all groups share."""
        row = 0
        for name, layers in self._kept_groups(blocks).items():
            yield name, row
            row += 2 * layers

    def _shared_shape(
        self, blocks: Sequence[Block], slots: Mapping[str, Slots]
    ) -> tuple[int, int, int, int] | None:
        """The state that some blocks share, with rows of the largest size; None if they share
        none."""
        kept = self._kept_groups(blocks)
        if not self.recipe.cache.padded or not kept:
            return None
        return (
            sum(2 * layers for layers in kept.values()),
            max(self.recipe.cache.state_heads, *(self.groups[name].heads for name in kept)),
            max(self.groups[name].dim for name in kept),
            max(slots[name].count for name in kept),
        )


def _kept(blocks: Sequence[Block]) -> Counter[str]:
    """The number of blocks that keep each memory, by its name."""
    return Counter(name for block in blocks for name in block.keeps)
