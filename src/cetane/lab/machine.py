"""Facts about this machine that can change a figure: the machine itself, and its packages."""

import os
import platform
from pathlib import Path

from cetane.measuring.machine import installed
from cetane.tasks.processes import installed_memory

PACKAGES = ("cetane", "torch", "coremltools", "transformers", "onnxruntime", "numpy")


def machine() -> dict[str, str | int]:
    """The machine of a measurement."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": processor(),
        "cores": os.cpu_count() or 0,
        "memory_bytes": installed_memory(),
    }


def processor() -> str:
    """The processor's name, on Linux from a file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def versions() -> dict[str, str]:
    """The versions of packages that can change a figure."""
    return {"python": platform.python_version()} | {name: installed(name) for name in PACKAGES}
