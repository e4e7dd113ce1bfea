"""The threads of arithmetic, and work that is shared out to them.

There is one for each processor, or as many as a task declares. The number of threads decides the
order of sums, and so their last bits. Libraries read the number from the environment, and so do our
own loops.
"""

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy.typing as npt

Made = TypeVar("Made")

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""The variables from which libraries read their number of threads. Our own loops read the first."""


def available() -> int:
    """The threads that arithmetic may use: OMP_NUM_THREADS, or this process's processors."""
    asked = os.environ.get(VARIABLES[0], "")
    return (int(asked) if asked.isdigit() else 0) or processors()


def processors() -> int:
    """The processors that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)  # only Linux can tell
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def over_rows(kernel: Callable[..., None], *arrays: "npt.NDArray[Any]") -> None:
    """Run `kernel(*arrays)` on slices of the arrays' first axis, on the threads of arithmetic.

    The kernels release the GIL and compute each row by itself, so slices do not change results.
    numba's own threads would abort if two Python threads used them at once.
    """
    rows, cores = len(arrays[0]), available()
    step = max(1, -(-rows // (4 * cores)))
    with ThreadPoolExecutor(cores) as pool:
        parts = [slice(start, start + step) for start in range(0, rows, step)]
        list(pool.map(lambda part: kernel(*(array[part] for array in arrays)), parts))


@contextmanager
def beside(work: Callable[[], Made]) -> Iterator[Callable[[], Made]]:
    """A context during which another thread does some work. It yields a function that waits for the
    work's result.

    Where arithmetic has one thread only, that function does the work itself.
    """
    if available() == 1:
        yield work
        return
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(work).result


@contextmanager
def threads(cores: int) -> Iterator[None]:
    """A context in which arithmetic has `cores` threads."""
    before = {name: os.environ.get(name) for name in VARIABLES}
    os.environ.update(dict.fromkeys(VARIABLES, str(cores)))
    torch = sys.modules.get("torch")
    threads_before = None if torch is None else torch.get_num_threads()
    if torch is not None:
        torch.set_num_threads(cores)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        if torch is not None:
            torch.set_num_threads(threads_before)
