"""Whether the loop of tapes is compiled, and how to compile it before it is needed."""

import os
from pathlib import Path

from cetane.files import KERNELS


def is_kept() -> bool:
    """Whether the loop of tapes was compiled before."""
    return any(Path(os.environ[KERNELS]).rglob("loop.perform*.nbc"))


def compile_loop() -> None:
    """Compile the loop of tapes, in 20 CPU seconds; if it is kept, load it in one."""
    from cetane.mil.fast.tape.loop import compile_

    compile_()
