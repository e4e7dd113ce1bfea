"""Memory that this process has freed, given back to the system."""

import ctypes
from contextlib import suppress

LARGE = 1 << 22
"""Bytes of an array that has pages of its own."""
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1
"""glibc's names of two options (`mallopt`)."""


def keep_little() -> None:
    """Let large arrays be given back when they are freed.

    glibc puts arrays as large as any that was freed before, up to 32 MB, among all others. There
    they take room after they are gone, and new arrays of zeros are written, page for page.
    """
    with suppress(AttributeError, OSError):  # another library of C
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGE)
        mallopt(TRIM_THRESHOLD, 8 * LARGE)


def give_back() -> None:
    """Give freed memory back to the system.

    glibc keeps it, and what one step leaves lies between the arrays of others. Rounding SmolLM2's
    210 layers grew the process by 2.7 GB, of which 0.6 GB were in use.
    """
    with suppress(AttributeError, OSError):  # another library of C
        ctypes.CDLL(None).malloc_trim(0)
