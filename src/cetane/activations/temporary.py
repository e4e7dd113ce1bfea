"""What coremltools leaves behind, in a folder that goes.

coremltools writes a package for every model it opens and removes it when Python ends, if it ends
well: a calibration of Gemma 4 left 38 GB (CoreML-LLM, experiment 3.10).
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "cetane-activations-"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that takes all temporary files of this process while the block runs, and is removed
    with them after it, however it ends. Not for several threads: the place is the process's."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=PREFIX) as folder:
        tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = before
