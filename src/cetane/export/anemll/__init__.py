"""The folder that ANEMLL's app and `chat.py` load (Anemll/Anemll, commit 45ce981).

Its packages differ from cetane's. One state holds the keys and values of all layers. A package
of its own looks tokens up, and rotary tables are inside the graph. So the export lowers
shards once more, from the same checkpoint and recipe. Sources of the contract:
`ModelLoader.swift`, `YAMLConfig.swift`, `InferenceManager.swift` and `tests/chat.py` of that
repository. In this folder, "their" and "hosts" mean ANEMLL's.
"""

from cetane.export.anemll.check import check
from cetane.export.anemll.folder import APP, COMPILE, FILES, export, packages

__all__ = ["APP", "COMPILE", "FILES", "check", "export", "packages"]
