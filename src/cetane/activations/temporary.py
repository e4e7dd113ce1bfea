"""A temporary folder for the packages that coremltools leaves behind.

coremltools writes a package for every model that it opens. It removes them only when Python ends
well: a calibration of Gemma 4 left 38 GB (CoreML-LLM, experiment 3.10).
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "cetane-activations-"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A context whose folder takes all temporary files of this process, and is always removed.

    Do not use it in several threads: the setting belongs to the process.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before
