"""A quiet import of coremltools, without warnings that a user cannot act on."""

import logging
import sys
from types import ModuleType


def import_coremltools() -> ModuleType:
    """coremltools, with its loggers at ERROR, unless it was imported before.

    On import it warns of missing libraries, which exist only on macOS. It also warns that this
    torch version is newer than the tested ones. Both are true on every supported machine.
    """
    if "coremltools" not in sys.modules:
        logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools

    module: ModuleType = coremltools
    return module
