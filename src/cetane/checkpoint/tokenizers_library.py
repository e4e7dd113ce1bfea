"""What the tokenizers library needs around its calls: errors as CetaneErrors, and Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

from cetane.errors import CetaneError


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """A context that turns all errors of the tokenizers library into CetaneErrors.

    A panic of its Rust code is not an `Exception`.
    """
    try:
        yield
    except CetaneError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CetaneError(f"{what}: {error}") from error


def interruptible(work: Callable[[], list[int]]) -> list[int]:
    """What `work` returns, made in a thread of its own.

    Python handles Ctrl-C only between its own instructions, so native code runs in another thread.
    """
    made: Future[list[int]] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, daemon=True).start()
    return made.result()


def check_unicode(text: str) -> None:
    """Raise CetaneError for a text with half a character, which the library cannot take."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise CetaneError("the text to encode is not valid Unicode") from error
