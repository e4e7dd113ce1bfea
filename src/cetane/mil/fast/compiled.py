"""The folder in which numba keeps compiled functions, one for each version of the code.

numba compiles a function again if the file of the function changes, but not if the file of a
function that it calls changes. So callers would go on with an old kernel.
"""

import os
from pathlib import Path

from cetane.files import KERNELS, code_sha256, remove

CODE = Path(__file__).parent


def keep_by_code() -> None:
    """Let numba keep functions in the folder of this version of the code, and remove other folders.

    If `NUMBA_CACHE_DIR` is set, that folder is taken, as by `place_kernels`.
    """
    from numba import config  # takes a while to load

    if KERNELS in os.environ:
        return
    folder = _folder()
    try:
        for other in folder.parent.glob("compiled-*"):
            if other != folder:
                remove(other)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    config.CACHE_DIR = str(folder)


def is_kept() -> bool:
    """Whether the loop of tapes was compiled before."""
    folder = Path(os.environ.get(KERNELS) or _folder())
    return any(folder.rglob("loop.perform*.nbc"))


def compile_loop() -> None:
    """Compile the loop of tapes, in 20 CPU seconds; if it is kept, load it in one."""
    from cetane.mil.fast.tape.loop import compile_

    compile_()


def _folder() -> Path:
    return CODE / "__pycache__" / f"compiled-{code_sha256(CODE)[:16]}"
