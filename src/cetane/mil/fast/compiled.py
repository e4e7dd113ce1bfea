"""The folder of what numba has compiled, by the code that it was made of.

numba compares only the file of a function with what it kept, not the files of functions that it
calls. So a changed kernel would go on as it was.
"""

import os
from pathlib import Path

from numba import config

from cetane.files import code_sha256, remove

CODE = Path(__file__).parent


def keep_by_code() -> None:
    """Let numba keep functions of this version of the code, and forget those of others.

    Where nothing can be written, numba chooses another place. `NUMBA_CACHE_DIR` comes first.
    """
    if "NUMBA_CACHE_DIR" in os.environ:
        return
    folder = CODE / "__pycache__" / f"compiled-{code_sha256(CODE)[:16]}"
    try:
        for other in folder.parent.glob("compiled-*"):
            if other != folder:
                remove(other)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    config.CACHE_DIR = str(folder)
