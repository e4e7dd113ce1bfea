"""The machine: its facts, and whether a kit can be measured on it."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from . import Json
from .record import Halt

OLDEST = (15, 0)
"""The oldest macOS with functions and states in one package (iOS 18)."""
FACTS = {
    "chip": "machdep.cpu.brand_string",
    "model": "hw.model",
    "memory_bytes": "hw.memsize",
    "build": "kern.osversion",
}


def is_mac() -> bool:
    return platform.system() == "Darwin"


def facts() -> Json:
    """What a record says of its machine."""
    own: Json = {name: sysctl(key) for name, key in FACTS.items()} if is_mac() else {}
    memory = own.get("memory_bytes") or ""
    return {
        "mac": is_mac(),
        "chip": own.get("chip") or platform.processor() or platform.machine(),
        "model": own.get("model") or platform.machine(),
        "virtual": (own.get("model") or "").startswith("VirtualMac"),
        "memory_bytes": int(memory) if memory.isdigit() else 0,
        "system": f"macOS {platform.mac_ver()[0]}" if is_mac() else platform.system(),
        "build": own.get("build") or platform.release(),
        "python": platform.python_version(),
        "coremltools": installed("coremltools"),
        "numpy": installed("numpy"),
        "power": said("pmset", "-g", "batt")[:200],
        "thermal": said("pmset", "-g", "therm")[:400],
        "load": round(os.getloadavg()[0], 2),
    }


def installed(package: str) -> str:
    """The version of a package, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def sysctl(name: str) -> str:
    return said("sysctl", "-n", name)


def said(*command: str) -> str:
    """The output of a command, as one line; empty if it is absent, or takes over 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(done.stdout.split())


def check(machine: Json, needed: int, folder: Path) -> None:
    """Raise Halt if this machine cannot measure. `needed` are bytes of disk in `folder`."""
    if machine["coremltools"] == "not installed":
        raise Halt("coremltools is not installed: run this script with `uv run measure.py`")
    if machine["mac"]:
        if platform.machine() != "arm64":
            raise Halt("it needs a Mac of Apple silicon, and a Python that is built for it")
        release = tuple(int(part) for part in platform.mac_ver()[0].split(".")[:2])
        if release < OLDEST:
            raise Halt(f"{machine['system']} is too old: the packages need macOS 15")
    check_disk(needed, folder)


def check_disk(needed: int, folder: Path) -> None:
    """Raise Halt if a folder's disk has fewer free bytes than `needed`."""
    if lacking := short_of_disk(needed, folder):
        raise Halt(f"{lacking}; free some space and run this again: it resumes")


def short_of_disk(needed: int, folder: Path) -> str:
    """What a folder's disk lacks of `needed` bytes, in words; empty if there is enough.

    Apple's compiler keeps inputs that were deleted; one machine lost 178 GiB to them.
    """
    free = shutil.disk_usage(folder).free
    if free >= needed:
        return ""
    return f"{free / 1e9:.1f} GB are free in {folder}, and {needed / 1e9:.1f} GB are needed"


def peak_bytes() -> int:
    """The most memory that this process had, in bytes."""
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # here ru_maxrss also counts the memory of the process that started this one
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(status["VmHWM"].split()[0])
