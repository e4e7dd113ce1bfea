"""Tapes that run: their weights, their arrays, and the threads that share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice
from queue import SimpleQueue
from typing import BinaryIO

import numpy as np

from cetane.errors import CetaneError
from cetane.mil.dtypes import Array
from cetane.mil.fast.arrays import HELD_AS, held
from cetane.mil.fast.functions import FastFunction
from cetane.mil.fast.tape.code import LARGEST, Tape
from cetane.mil.program import Signature
from cetane.threads import available

SMALLEST = 1 << 20
"""The fewest multiplications of a tape that threads share."""
_sharing = False
_free = threading.Lock()
"""Held by the call whose tape threads share. Another call at that time runs on one thread."""


def share_tapes() -> None:
    """Let the threads of arithmetic share large tapes.

    They wait actively for each other, so call this only in a program that owns its process.
    """
    global _sharing
    _sharing = True


class TapeStage:
    """A whole function as a tape: a stage of `FastFunction`."""

    def __init__(self, tape: Tape, signature: Signature, weights: Array) -> None:
        """`weights` are the bytes of the program's store, uint8."""
        self._tape, self._signature, self._weights = tape, signature, weights
        self._arena = np.empty(tape.arena + 16, np.float32)
        self._runs = np.empty(max(1, tape.runs), np.int64)
        self._shared = np.zeros(1, np.int64)
        """The number through which threads wait for each other; 0 when a call begins."""
        self._own = threading.Lock()
        """Held by a call, since the arena and the runs are those of one."""
        fixed = self._arena, self._weights, self._runs
        self._bases = np.array([array.ctypes.data for array in fixed], np.int64)
        types = {**signature.outputs, **signature.states}
        self._shapes = [type_.static_shape or () for type_ in signature.outputs.values()]
        self._integers = [
            (number, type_.dtype)
            for number, type_ in enumerate(types.values())
            if HELD_AS[type_.dtype] != np.float32
        ]

    def run(self, values: dict[str, Array], states: dict[str, Array]) -> None:
        """Add the results to a call's values, and replace its states."""
        signature = self._signature
        given = [
            np.ascontiguousarray(values[name], np.int8)
            if type_.dtype == "int8"
            else _floats(values[name])
            for name, type_ in signature.inputs.items()
        ]
        given += [_floats(states[name]) for name in signature.states]
        results = [np.empty(shape, np.float32) for shape in self._shapes]
        for number in self._tape.transposed:
            *shape, last = self._shapes[number]
            results[number] = np.moveaxis(np.empty((last, *shape), np.float32), 0, -1)
        results += [np.empty(states[name].shape, np.float32) for name in signature.states]
        with self._own:
            self._perform([*given, *results])
        for number, dtype in self._integers:
            results[number] = held(np.rint(results[number]), dtype)
        values.update(zip(signature.outputs, results, strict=False))
        states.update(zip(signature.states, results[len(self._shapes) :], strict=True))

    def _perform(self, arrays: Sequence[Array]) -> None:
        from cetane.mil.fast.tape.loop import perform  # numba takes a while to load

        bases = np.concatenate([self._bases, [array.ctypes.data for array in arrays]])
        self._shared[0] = 0
        tape = self._tape
        work = partial(perform, tape.code, tape.numbers, bases, self._shared.ctypes.data)
        threads = available() if _sharing and tape.work >= SMALLEST else 1
        if threads > 1 and _free.acquire(blocking=False):
            try:
                failed = self._divide(work, threads)
            finally:
                _free.release()
        else:
            failed = work(0, 1)
        if failed >= 0:
            raise CetaneError("a gather or an update has a position outside of its tensor")

    def _divide(self, work: Callable[[int, int], int], threads: int) -> int:
        """Let threads share the work; this one has the number 0.

        They wait for each other inside of it. So if Ctrl-C comes here, all must still take their
        shares, and end before the next call."""
        pool, numbers = _pool(threads - 1), iter(range(1, threads))
        ended: SimpleQueue[int] = SimpleQueue()

        def take() -> None:
            """Do another thread's share, if one is left."""
            for number in islice(numbers, 1):
                try:
                    work(number, threads)
                finally:
                    ended.put(number)

        try:
            for _ in range(1, threads):
                pool.submit(take)
            failed = work(0, threads)
        except BaseException:
            for _ in range(1, threads):  # perhaps some were not called
                pool.submit(take)
            if self._shared[0] < threads:  # else this thread's share was done
                work(0, threads)
            raise
        finally:
            for _ in range(1, threads):
                ended.get()
        return failed


def _floats(array: Array) -> Array:
    """An input as float32. Raises CetaneError for integers that it does not hold."""
    # not np.abs: the lowest int32 has no positive counterpart
    if array.dtype.kind in "iu" and array.size and max(array.max(), -int(array.min())) > LARGEST:
        raise CetaneError(f"an input has an integer larger than {LARGEST}, the most of a tape")
    return np.ascontiguousarray(array, np.float32)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="tape")


def mapped(file: BinaryIO) -> Array:
    """A file's bytes, mapped into memory; an empty file gives an empty array."""
    empty = file.seek(0, 2) == 0
    return np.empty(0, np.uint8) if empty else np.memmap(file, np.uint8, "r")


def function_of(
    signature: Signature, tape: Tape, weights: Array, beside: Collection[str]
) -> FastFunction:
    """A function that runs as one tape; `weights` are the bytes of its store, uint8, and `beside`
    the names of all functions with this store."""
    return FastFunction(signature, [TapeStage(tape, signature, weights)], beside)
