"""A bundle for developers of other apps: its packages, a description of every call, and a host.

`contract.json` describes all functions as data, `CONTRACT.md` in words. `host.py` runs the bundle
with NumPy and Core ML, and imports nothing of cetane. It is written for the bundle: it has code
only for what the bundle's functions take and give.
"""

from cetane.export.contract.check import check, files
from cetane.export.contract.describe import means
from cetane.export.contract.folder import export
from cetane.export.contract.memory import MemoryFigures, memory_figures

__all__ = ["MemoryFigures", "check", "export", "files", "means", "memory_figures"]
