"""The folder of functions that numba has compiled."""

import atexit
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from cetane.files.hashes import code_sha256
from cetane.files.paths import cache_dir
from cetane.files.writing import remove

KERNELS, KERNELS_OF = "NUMBA_CACHE_DIR", "cetane-kernels-"
"""The variable that names numba's folder of compiled functions, which child processes inherit, and
what the names of cetane's own such folders begin with."""


def place_kernels(package: Path) -> None:
    """Let numba keep compiled functions in a folder of this version of the code, in the package.

    numba compiles a function again if the file of the function changes, but not if the file of a
    function that it calls changes. So callers would go on with an old kernel. Only functions of
    `mil/fast` call each other over files.

    If the package is read-only, the folder is in the cache folder. If that is read-only too, a
    folder of this process takes them: numba refuses to compile what it cannot keep anywhere. A
    user's own choice stays, and a parent's folder if its code is the same.
    """
    own, given = KERNELS_OF + code_sha256(package / "mil" / "fast")[:16], os.environ.get(KERNELS)
    if given and (not (name := Path(given).name).startswith(KERNELS_OF) or name.startswith(own)):
        return
    folder = package / "__pycache__" / own
    try:
        if os.access(package, os.W_OK):
            if not folder.is_dir():
                for other in folder.parent.glob(f"{KERNELS_OF}*"):
                    with suppress(OSError):  # another process removes it too
                        remove(other)
        else:
            folder = cache_dir() / "kernels" / own
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"{own}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ[KERNELS] = str(folder)
    if "numba" in sys.modules:  # it has read the variable before
        sys.modules["numba"].config.CACHE_DIR = str(folder)
