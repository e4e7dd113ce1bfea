"""Faults: what went wrong in a child process, in one kind and a few words."""

from __future__ import annotations

import re
import signal
from typing import Any, Literal

Kind = Literal[
    "time limit",  # it ran longer than allowed, and was killed
    "died",  # it ended by a signal or an exit code, without an answer
    "error",  # Core ML or the host raised an error
    "not finite",  # an output has NaN or infinity
    "interrupted",  # this script was killed while it ran
    "disk full",
]
REFUSALS = re.compile(
    r"ANECCompile\(\) FAILED|Falling back|MLIR pass manager failed|E5RT|Espresso exception"
    r"|error code: ?-\d+|not supported on (the )?(ANE|Neural Engine)|ANE model load has failed",
    re.IGNORECASE,
)
"""Lines of stderr in which Apple's compilers refuse a program, or a part of it. The first is from
coremltools #2758; "Falling back" is from the log of Core AI's placements."""
MOST_LINES, LONGEST = 20, 300
"""The most lines that are kept, and the most characters of each."""


def refusals(stderr: str) -> list[str]:
    """The lines of stderr in which a compiler refuses something."""
    lines = [line.strip()[:LONGEST] for line in stderr.splitlines() if REFUSALS.search(line)]
    return list(dict.fromkeys(lines))[:MOST_LINES]


def ending(code: int) -> str:
    """The end of a process, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def last_lines(stderr: str) -> str:
    """The end of stderr, as one line."""
    return " ".join(stderr.split())[-600:]


def fault(job: str, phase: str, kind: Kind, detail: str) -> dict[str, Any]:
    """A fault as it is recorded."""
    return {"job": job, "phase": phase, "kind": kind, "detail": printable(detail)}


def printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:1000]
