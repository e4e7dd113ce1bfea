"""The patches that put cetane's proxy in the place of Core ML's binding.

coremltools imports `_MLModelProxy` from a library that only its macOS wheel has; elsewhere it keeps
None. Its classes also ask for the version of macOS before they use states, compiled models or
hints. The patches replace only these names, in the modules that use them.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

from cetane.bridge.proxy import AssetProxy, make_proxy
from cetane.errors import CetaneError
from cetane.hardware.quiet import import_coremltools
from cetane.mil.program import Precision

MACOS = (15, 0)  # the version with all features of iOS 18

_LIBRARY = "coremltools.libcoremlpython"
_ABSENT = object()

_saved: list[tuple[Any, str, Any]] = []


def installed() -> bool:
    """Whether the bridge is in place."""
    return bool(_saved)


def install(precision: str = "fp32", fast: bool = True) -> bool:
    """Let coremltools predict here. Returns True if it now predicts through the bridge.

    On a Mac, coremltools has Core ML itself: nothing happens, and the result is False. "fp32"
    computes in float32. "fp16" rounds every result that the program types as fp16, as a machine
    with fp16 storage does. `fast` allows onnxruntime for functions that it can run, in fp32 only;
    the reference executor runs the others. A second call only changes the options of models that
    are loaded later. Raises CetaneError for an unknown precision.
    """
    if precision not in ("fp32", "fp16"):
        raise CetaneError(f'precision {precision!r} is not known: it is "fp32" or "fp16"')
    logger = logging.getLogger("coremltools")
    level = logger.level
    import_coremltools()
    logger.setLevel(level)  # the script sees later warnings
    if not installed():
        if importlib.import_module("coremltools.models.model")._MLModelProxy is not None:
            return False
    else:
        uninstall()
    chosen: Precision = "fp16" if precision == "fp16" else "fp32"
    proxy = make_proxy(chosen, fast)
    library = ModuleType(_LIBRARY, "Stands in for Core ML's Python binding; see cetane.bridge.")
    library.__dict__.update(_MLModelProxy=proxy, _MLModelAssetProxy=AssetProxy)
    _saved.append((sys.modules, _LIBRARY, sys.modules.get(_LIBRARY, _ABSENT)))
    sys.modules[_LIBRARY] = library
    for module in ("model", "_compiled_model", "compute_plan", "compute_device"):
        _replace(module, "_MLModelProxy", proxy)
    _replace("model", "_MLModelAssetProxy", AssetProxy)
    _replace("model", "_is_macos", lambda: True)
    for module in ("model", "_compiled_model", "utils"):
        _replace(module, "_macos_version", lambda: MACOS)
    return True


def uninstall() -> None:
    """Restore the names that `install` replaced. Models that are already loaded keep working."""
    while _saved:
        where, name, value = _saved.pop()
        if isinstance(where, ModuleType):
            setattr(where, name, value)
        elif value is _ABSENT:
            where.pop(name, None)
        else:
            where[name] = value


def _replace(module: str, name: str, value: Any) -> None:
    where = importlib.import_module(f"coremltools.models.{module}")
    _saved.append((where, name, getattr(where, name)))
    setattr(where, name, value)
