"""Import coremltools without the messages that tell a user nothing they can act on."""

import logging
from types import ModuleType


def import_coremltools() -> ModuleType:
    """coremltools, with its loggers at ERROR.

    It warns on import that libraries which exist on macOS only are missing and that this torch
    version is newer than the ones it was tested with; both hold on every supported machine.
    """
    logging.getLogger("coremltools").setLevel(logging.ERROR)
    import coremltools

    module: ModuleType = coremltools
    return module
