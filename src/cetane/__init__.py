"""cetane: port language models to Apple's Neural Engine from any machine.

This is the public API. Every function returns data, prints nothing, and raises only `CetaneError`.
`__init__.pyi` lists the names. Each is imported on first use, since some need torch.
"""

import os
from typing import Any

from lazy_loader import attach_stub

__version__ = "0.1.0"

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
"""onnxruntime sends events to Microsoft unless this is set before its import. cetane sends none."""
EXTRAS = {"serve": "serve", "evaluate": "eval"}
"""The extra that installs a function's packages, by function."""

_import, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    try:
        return _import(name)
    except ModuleNotFoundError as error:
        if name not in EXTRAS:
            raise
        from cetane.errors import CetaneError, installing

        hint = installing(EXTRAS[name])
        raise CetaneError(f"cetane.{name} needs the package {error.name}", hint) from error
