"""The folder that CoreML-LLM's Swift runtime loads for Gemma 4 (commit 72178c6).

Its packages differ from cetane's: channels last, caches 512 wide, and a token chosen inside. So
the export lowers shards once more inside an adapter, from the same checkpoint and recipe. Sources
of the contract: `ChunkedEngine.swift`, `ModelConfig.swift` and `EmbeddingLookup.swift` of that
repository, and the builders of its packages. In this folder, "their" means CoreML-LLM's.
"""

from cetane.export.coreml_llm.check import check
from cetane.export.coreml_llm.folder import APP, COMPILE, FILES, export, packages

__all__ = ["APP", "COMPILE", "FILES", "check", "export", "packages"]
