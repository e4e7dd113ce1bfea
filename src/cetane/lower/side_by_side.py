"""The conversion of functions side by side, in forked copies of this process."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context

import torch

from cetane.lower.converted import Converted

MOST = 4
"""The most copies at a time. Each holds one function's tensors while torch traces it."""
_work: Sequence[Callable[[], Converted]] = ()
"""The conversions. A copy inherits them: a function's modules cannot be sent to another process."""


def side_by_side(work: Sequence[Callable[[], Converted]]) -> Iterator[Converted]:
    """The results of some conversions, in order.

    At most `MOST` run at a time, and no more than torch may use threads. This process itself
    converts all of them with one thread, and outside Linux: macOS' libraries do not survive a fork.
    If a copy dies, for example for want of memory, this process converts the rest.
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
    """Prepare a copy. It has one thread: more would wait for threads that a fork leaves behind."""
    torch.set_num_threads(1)
    gc.disable()  # a copy lives for a few seconds


def perform(number: int) -> Converted:
    """One conversion, in a copy."""
    return _work[number]()
