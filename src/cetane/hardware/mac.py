"""Facts about this Mac; empty on other machines."""

import platform
import subprocess

BRAND, BUILD = "machdep.cpu.brand_string", "kern.osversion"


def is_mac() -> bool:
    return platform.system() == "Darwin"


def sysctl(name: str) -> str:
    """A value of a Mac's kernel, by its name; empty if there is none."""
    asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def os_build() -> str | None:
    """The build of macOS, such as "25B78"; None on other systems.

    Programs compiled for one build do not load on another (error -14, ane-book, research on chained
    shards).
    """
    return (sysctl(BUILD) or None) if is_mac() else None
