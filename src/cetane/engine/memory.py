"""The memory of a sequence: its slots, caches, histories, matrices and marks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from cetane.engine.backend import Array, Arrays
from cetane.engine.call import Call
from cetane.engine.slots import EMPTY, call_slots, depths, grown, slots_after
from cetane.errors import CetaneError
from cetane.schema.function import Function
from cetane.schema.interface import (
    FromCache,
    FromHistory,
    FromMatrix,
    Input,
    Kept,
    Order,
    ToHistory,
    ToMatrix,
    time_axis,
)
from cetane.schema.slots import Slots


@dataclass(frozen=True)
class Mark:
    """The memory of a sequence at an earlier position."""

    position: int
    capacity: int
    groups: Mapping[str, Slots]
    slots: dict[str, Array]
    caches: Arrays
    histories: Arrays
    matrices: Arrays

    def copied(self) -> "Mark":
        """A mark with arrays of its own, for another session."""
        slots, caches, histories, matrices = (
            {name: array.copy() for name, array in arrays.items()}
            for arrays in (self.slots, self.caches, self.histories, self.matrices)
        )
        return replace(self, slots=slots, caches=caches, histories=histories, matrices=matrices)


class Memory:
    """The memory of one sequence. Its arrays have the backend's `dtype`, or are int8 where a
    function says so.

    All masks follow from the positions in the slots. So one rule serves every contract, padding and
    windows. `grow` takes the groups of a larger capacity. A cache itself grows when a function
    reads it, since shards may run all calls one after another.
    """

    def __init__(
        self,
        groups: Mapping[str, Slots],
        functions: Iterable[Function],
        order: Order,
        dtype: type[np.floating],
        start: int = 0,
    ) -> None:
        """An empty memory for the cache groups and the inputs of some functions."""
        self.groups, self.order, self.dtype = groups, order, dtype
        self.capacity = 0
        """The tokens for which `grow` made room."""
        self.position = start
        """The position of the next token."""
        self.slots = {name: np.full(group.count, EMPTY) for name, group in groups.items()}
        """By cache group: the position that each slot holds, or EMPTY; int `(S,)`."""
        inputs = [item for function in functions for item in function.inputs]
        self.caches = zeros(inputs, FromCache, dtype)
        """By name: keys or values of a shard's layers, `(L, KV, D, S)`, in `dtype` or int8; and the
        scales of int8 ones, in `dtype`."""
        self.histories = zeros(inputs, FromHistory, dtype)
        """By name: the last columns of a small tensor of each layer."""
        self.matrices = zeros(inputs, FromMatrix, np.float32)
        """By name: what layers keep of all earlier tokens, `(L, heads, keys, groups * values)`."""
        self.group_of = {
            item.source.name: item.source.group
            for item in inputs
            if isinstance(item.source, FromCache)
        }
        """The group of every cache."""

    def grow(self, capacity: int, groups: Mapping[str, Slots]) -> None:
        """Take groups with at least as many slots, for a larger capacity."""
        self.slots = {
            name: grown(self.slots[name], group.contract, group.count, EMPTY)
            for name, group in groups.items()
        }
        self.capacity, self.groups = capacity, groups

    def cache(self, source: FromCache, slots: int) -> Array:
        """A cache of so many slots, for a function that reads it."""
        cache = self.caches[source.name]
        if cache.shape[-1] != slots:
            cache = grown(cache, self.groups[source.group].contract, slots, 0)
            self.caches[source.name] = cache
        return cache

    def place(self, tokens: Array, width: int, parents: tuple[int, ...] | None = None) -> Call:
        """A call of the next `tokens (n,)`, in a function of `width >= n` tokens; `parents` as in
        `Call`.

        Each token of a tree has a slot of its own. Its position follows from its depth, so tokens
        of different branches may share a position.
        """
        columns = self.position + np.arange(len(tokens))
        positions = columns if parents is None else self.position + depths(parents)
        groups = {
            name: call_slots(group, self.slots[name], columns, positions, width)
            for name, group in self.groups.items()
        }
        return Call(tokens, positions, width, self.order, groups, parents)

    def advance(self, call: Call) -> None:
        """Count the tokens of a call as run. `write` stores its columns."""
        self.slots = {name: group.after for name, group in call.groups.items()}
        self.position += len(call.tokens)

    def accept(self, call: Call, writes: Sequence[tuple[Kept, Array]], path: Sequence[int]) -> None:
        """Count the tokens in some columns of a call as run, in this order, and write them."""
        self.write_accepted(call, writes, path)
        self.count_accepted(call, path)

    def write_accepted(
        self, call: Call, writes: Sequence[tuple[Kept, Array]], path: Sequence[int]
    ) -> None:
        """Write the accepted columns of a call."""
        if path:
            for sink, value in writes:
                self.write(sink, value, call, path)

    def count_accepted(self, call: Call, path: Sequence[int]) -> None:
        """Count the accepted columns of a call as run. `write_accepted` stores them."""
        columns = self.position + np.arange(len(call.tokens))
        self.slots = {
            name: slots_after(group, self.slots[name], columns, columns[: len(path)], call.width)
            for name, group in self.groups.items()
        }
        self.position += len(path)

    def write(self, sink: Kept, value: Array, call: Call, path: Sequence[int]) -> None:
        """Store the columns `path` of a call as those of the next tokens."""
        count = len(path)
        taken = slice(count) if list(path) == list(range(count)) else list(path)
        if isinstance(sink, ToHistory):
            axis, past = time_axis(self.order), self.histories[sink.name]
            joined = np.concatenate([past, np.take(value, path, axis)], axis)
            length = past.shape[axis]
            self.histories[sink.name] = np.take(joined, range(-length, 0), axis)
        elif isinstance(sink, ToMatrix):
            new = value.reshape(*value.shape[:2], -1)[..., taken]
            self.matrices[sink.name] = folded(self.matrices[sink.name], new, sink.groups)
        elif self.groups[sink.group].shifts and (sink.write == "append" or count < call.width):
            new = value if sink.write == "append" else value[..., -call.width :]
            joined = np.concatenate([self.caches[sink.name], new[..., taken]], -1)
            self.caches[sink.name] = joined[..., count:]
        elif sink.write == "append":
            cache, targets = self.caches[sink.name], call.groups[sink.group].targets[:count]
            for target, source in runs(targets, path):
                cache[..., target] = value[..., source]
        elif count < len(call.tokens):  # the graph wrote refused tokens too
            written = call.groups[sink.group].targets
            kept = self.caches[sink.name].copy()
            kept[..., written[:count]] = value[..., written[taken]]
            self.caches[sink.name] = kept
        else:
            self.caches[sink.name] = value

    def take(self, other: "Memory") -> None:
        """Hold what another memory of this plan holds, in this one's dtype."""
        self.position, self.capacity, self.groups = other.position, other.capacity, other.groups
        self.slots = dict(other.slots)
        self.caches = {
            name: a.astype(a.dtype if a.dtype == np.int8 else self.dtype)
            for name, a in other.caches.items()
        }
        self.histories = {name: a.astype(self.dtype) for name, a in other.histories.items()}
        self.matrices = {name: a.copy() for name, a in other.matrices.items()}

    def mark(self) -> Mark:
        """A mark of the current memory, to which `rewind` returns, as often as wanted."""
        if any(group.forgets for group in self.groups.values()):
            raise CetaneError("a state of a window keeps no earlier tokens, so it takes no marks")
        return Mark(
            position=self.position,
            capacity=self.capacity,
            groups=self.groups,
            slots=self.slots,
            caches=self._apart(self.caches),
            histories=dict(self.histories),
            matrices=dict(self.matrices),
        )

    def rewind(self, mark: Mark) -> None:
        """Return to a mark, which stays as it is. Later marks become void."""
        self.position, self.slots = mark.position, mark.slots
        self.capacity, self.groups = mark.capacity, mark.groups
        self.caches, self.histories = self._apart(mark.caches), dict(mark.histories)
        self.matrices = dict(mark.matrices)

    def _apart(self, caches: Arrays) -> Arrays:
        """Caches of which a mark and later calls cannot change each other's.

        A cache of the whole context needs no copy. Either a call replaces it, so the mark keeps the
        old array. Or a call writes columns after the mark, which no mask shows before they are
        written again. The slots of a window are used again, so that cache is copied.
        """
        return {
            name: cache.copy() if self.groups[self.group_of[name]].limited else cache
            for name, cache in caches.items()
        }


def zeros(inputs: Sequence[Input], source: type[Any], dtype: type[np.floating]) -> Arrays:
    """Zeros for all inputs of one kind of source, by the source's name.

    Each array has the smallest shape of any function. It is int8 where the input is, else of
    `dtype`. Pages without a write take no memory.
    """
    smallest: dict[str, Input] = {}
    for item in inputs:
        if isinstance(item.source, source):
            name = item.source.name
            smallest[name] = min(smallest.get(name, item), item, key=lambda one: prod(one.shape))
    return {
        name: np.zeros(item.shape, np.int8 if item.dtype == "int8" else dtype)
        for name, item in smallest.items()
    }


def runs(
    targets: Sequence[int] | Array, sources: Sequence[int] | Array
) -> Iterator[tuple[slice, slice]]:
    """Pairs of columns as slices: numpy copies a run much faster than single columns."""
    pairs = list(zip(np.asarray(targets).tolist(), np.asarray(sources).tolist(), strict=True))
    start = 0
    for stop in range(1, len(pairs) + 1):
        target, source = pairs[stop - 1]
        if pairs[stop : stop + 1] != [(target + 1, source + 1)]:
            yield slice(pairs[start][0], target + 1), slice(pairs[start][1], source + 1)
            start = stop


def folded(matrices: Array, columns: Array, groups: int) -> Array:
    """Matrices after the tokens of some columns, fp32.

    `matrices (L, heads, keys, groups * values)`; `columns (L, C, n)` hold keys, values and
    logarithms of decays, one below the other (`ToMatrix`).
    """
    layers, heads, size, width = matrices.shape
    new = columns.astype(np.float32)
    at = (heads * size, heads * (size + width))
    keys, values, decays = np.split(new, at, axis=1)
    decays = decays.reshape(layers, heads, groups, -1)
    ends = decays.sum(-1, keepdims=True)
    # The share of a token that the later decays leave. Their own sum: a difference of running sums
    # would lose small decays after large ones.
    after = np.concatenate([decays[..., 1:], np.zeros_like(ends)], -1)
    later = np.exp(after[..., ::-1].cumsum(-1)[..., ::-1])
    rows = values.reshape(layers, heads, groups, width // groups, -1) * later[:, :, :, None]
    added = keys.reshape(layers, heads, size, -1) @ rows.reshape(layers, heads, width, -1).swapaxes(
        2, 3
    )
    shrunk = matrices.reshape(layers, heads, size, groups, -1) * np.exp(ends)[:, :, None]
    result: Array = shrunk.reshape(matrices.shape)
    result += added
    return result
