"""Memory that this process has freed, given back to the system."""

import ctypes
from contextlib import suppress


def give_back() -> None:
    """Give freed memory back to the system.

    glibc keeps it, and what one step leaves lies between the arrays of others. Rounding SmolLM2's
    210 layers grew the process by 2.7 GB, of which 0.6 GB were in use.
    """
    with suppress(AttributeError, OSError):  # another library of C
        ctypes.CDLL(None).malloc_trim(0)
