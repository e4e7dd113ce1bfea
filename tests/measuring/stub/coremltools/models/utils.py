import errno
import os
from pathlib import Path


def compile_model(package, destination=None):
    if os.environ.get("FULL"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    folder = Path(destination)
    folder.mkdir(parents=True)
    (folder / "package").write_text(package)
    return str(folder)
