"""Import coremltools without the messages that tell a user nothing they can act on."""

import logging
import sys
from types import ModuleType


def import_coremltools() -> ModuleType:
    """coremltools, with its loggers at ERROR, unless somebody imported it before us.

    It warns on import that libraries which exist on macOS only are missing and that this torch
    version is newer than the ones it was tested with; both hold on every supported machine.
    """
    if "coremltools" not in sys.modules:
        logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools

    module: ModuleType = coremltools
    return module
