"""Core ML's protobuf messages, without importing the rest of coremltools.

`import coremltools` takes seconds, since it imports torch and transformers; the messages take no
time. Both ways give the same classes: protobuf keeps one class for each message name.
"""

import importlib
import importlib.util
import sys
from functools import cache
from types import ModuleType
from typing import Any

from cetane.errors import CetaneError

_ALIAS = "cetane.mil._coreml"
"""The name under which coremltools' folder of messages is imported."""


@cache
def model_message() -> Any:
    """The class of Core ML's Model message. Raises CetaneError if coremltools is not installed."""
    spec = importlib.util.find_spec("coremltools")
    if spec is None or not spec.submodule_search_locations:
        raise CetaneError("coremltools is not installed", "pip install coremltools==9.0")
    package = ModuleType(_ALIAS)
    package.__path__ = [f"{spec.submodule_search_locations[0]}/proto"]
    sys.modules[_ALIAS] = package
    return importlib.import_module(f"{_ALIAS}.Model_pb2").Model
