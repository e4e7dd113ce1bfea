"""The guard: turns any exception that a damaged program causes in a library into a CetaneError."""

from collections.abc import Iterator
from contextlib import contextmanager

from cetane.errors import LONGEST, CetaneError

_FAILURES = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


@contextmanager
def failures_at(where: str) -> Iterator[None]:
    """A context whose failures become CetaneErrors that name `where`."""
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
