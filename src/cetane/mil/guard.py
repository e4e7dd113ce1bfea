"""One place that turns whatever a damaged program makes a library raise into a CetaneError."""

from collections.abc import Iterator
from contextlib import contextmanager

from cetane.errors import CetaneError

_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
LONGEST = 300
"""Characters of a reason that a message quotes."""


@contextmanager
def failures_at(where: str) -> Iterator[None]:
    """Say where a program failed. The kind of an exception depends on what is wrong with it."""
    try:
        yield
    except CetaneError as error:
        if error.message.startswith(where):
            raise
        raise CetaneError(f"{where}: {error.message}", error.hint) from error
    except _FAILURES as error:
        raise CetaneError(f"{where}: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """The first line of an exception, and its kind."""
    first = str(error).strip().partition("\n")[0][:LONGEST]
    return f"{first} ({type(error).__name__})" if first else type(error).__name__
