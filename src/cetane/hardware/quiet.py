"""coremltools and transformers without warnings that a user cannot act on."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from types import ModuleType


def import_coremltools() -> ModuleType:
    """coremltools, with its loggers at ERROR, unless it was imported before.

    On import it warns of missing libraries, which exist only on macOS. It also warns that this
    torch version is newer than the tested ones. Both are true on every supported machine.

    To convert scikit-learn's models, it also loads scikit-learn, and with it pandas and pyarrow.
    That takes a second of processor time, so scikit-learn is hidden from it.
    """
    if "coremltools" not in sys.modules:
        logging.getLogger("coremltools").setLevel(logging.ERROR)
    with hidden("sklearn"):
        import coremltools

    module: ModuleType = coremltools
    return module


@contextmanager
def hidden(library: str) -> Iterator[None]:
    """A context in which a library that is not loaded yet cannot be."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[library]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """A context without transformers' progress bars, warnings and logged errors.

    They quote what a stranger wrote into a config. Whatever it logs as an error it also raises.
    """
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stderr(StringIO()):  # its reader of GGUF has a bar of its own
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
