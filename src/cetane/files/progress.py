"""Progress of a job, as its caller hears of it."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the number of finished parts, and the number of all parts."""


def silent(what: str, done: int, total: int) -> None:
    """Progress that is not shown."""
