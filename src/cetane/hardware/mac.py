"""What a Mac says about itself; nothing, on other machines."""

import platform
import subprocess

BRAND, BUILD = "machdep.cpu.brand_string", "kern.osversion"


def is_mac() -> bool:
    return platform.system() == "Darwin"


def sysctl(name: str) -> str:
    """What the kernel says."""
    asked = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return asked.stdout.strip()


def os_build() -> str | None:
    """The build of macOS, as "25B78": programs that are compiled for one do not load on another
    (error -14, ane-book, research on chained shards). None on other systems."""
    return (sysctl(BUILD) or None) if is_mac() else None
