"""The folder of what numba has compiled, by the code that it was made of.

numba compares only the file of a function with what it kept, not the files of functions that it
calls. So a changed kernel would go on as it was.
"""

import os
from pathlib import Path

from cetane.files import code_sha256, remove

CODE = Path(__file__).parent


def keep_by_code() -> None:
    """Let numba keep functions of this version of the code, and forget those of others.

    Where nothing can be written, numba chooses another place. `NUMBA_CACHE_DIR` comes first.
    """
    from numba import config  # takes a while to load

    if "NUMBA_CACHE_DIR" in os.environ:
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
    """Whether the loop of tapes was compiled before, by this version of the code; of another
    folder's nothing is known."""
    return "NUMBA_CACHE_DIR" not in os.environ and any(_folder().rglob("loop.perform*.nbc"))


def compile_loop() -> None:
    """Compile the loop of tapes, or load it: 20 CPU seconds the first time, then one."""
    from cetane.mil.fast.tape.loop import compile_

    compile_()


def _folder() -> Path:
    return CODE / "__pycache__" / f"compiled-{code_sha256(CODE)[:16]}"
