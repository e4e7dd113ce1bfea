"""Functions that are converted side by side, by copies of this process."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from cetane.lower.converted import Converted

MOST = 4
"""Copies at a time: each holds one function's tensors while torch traces it."""
_work: Sequence[Callable[[], Converted]] = ()
"""For the copies: a function's modules cannot be sent to another process."""


def side_by_side(work: Sequence[Callable[[], Converted]]) -> Iterator[Converted]:
    """The results of some conversions, in order.

    As many run at a time as torch may use threads, so a worker with one core has no copies. There
    are none on macOS either, whose libraries do not outlive a fork. If a copy dies, say for want of
    memory, this process converts what is left.
    """
    global _work
    count = min(MOST, len(work), torch.get_num_threads())
    done = 0
    if count > 1 and sys.platform == "linux":
        _work = work
        try:
            with ProcessPoolExecutor(count, get_context("fork"), initializer=start) as pool:
                for converted in pool.map(perform, range(len(work))):
                    yield converted
                    done += 1
        except BrokenProcessPool:
            pass
        finally:
            _work = ()
    for convert in work[done:]:
        yield convert()


def start() -> None:
    """Prepare a copy: threads of its own would wait for those that a fork leaves behind."""
    torch.set_num_threads(1)
    gc.disable()  # it lives for a few seconds


def perform(number: int) -> Converted:
    """One conversion, in a copy."""
    return _work[number]()
