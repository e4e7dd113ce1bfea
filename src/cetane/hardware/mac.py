"""Facts about this Mac; empty on other machines."""

from cetane.measuring.machine import FACTS, is_mac, sysctl


def os_build() -> str | None:
    """The build of macOS, such as "25B78"; None on other systems.

    Programs compiled for one build do not load on another (error -14, ane-book, research on chained
    shards).
    """
    return (sysctl(FACTS["build"]) or None) if is_mac() else None
