"""The one exception for all errors that a user can mend."""

import re
import shlex

LONGEST = 300
"""The most characters of a message, and of a hint: a file's own words must not fill the screen."""
STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tabs and line ends, and marks that turn the direction of writing."""
SET_TMPDIR = "set TMPDIR to a folder that can be written"
"""The advice where no folder takes temporary files."""
DAMAGED_CHECKPOINT = "the checkpoint is damaged: download it again"
"""The advice where weights contradict each other, or are no numbers."""


class CetaneError(Exception):
    """Bad input or a broken file. The command line prints it as one line and exits with 2.

    `message` says what is wrong, where, and why. `hint` tells what to do next. Both are printable
    and short, even with the text of a hostile file.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = printable(message)
        self.hint = None if hint is None else printable(hint)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"


def installing(extra: str) -> str:
    """The command that installs the packages of an extra, by their names: they come from an index,
    but cetane from a wheel or a checkout."""
    from importlib.metadata import requires  # here: they take long to import, for a rare error

    from packaging.requirements import Requirement

    names = []
    for needed in map(Requirement, requires("cetane") or []):
        marker = needed.marker
        if marker and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            names.append(str(needed).partition(";")[0].strip())
    return shlex.join(["pip", "install", *names])


def printable(text: str, longest: int | None = LONGEST) -> str:
    """`text` as one line that is safe for any terminal.

    Control characters, marks that change the direction of writing, and lone surrogates are escaped.
    The middle of a long text is left out.
    """
    line = " ".join(filter(None, map(str.strip, re.split("[\r\n]", text))))
    if longest is not None:  # before `escaped`, which would be slow on a text of gigabytes
        line = shortened(line, 2 * longest)
    line = escaped(line)
    return line if longest is None else shortened(line, longest)


def escaped(text: str) -> str:
    """`text` with unprintable characters escaped, but for line ends.

    Such characters move a terminal's cursor, change its colours or title, or turn the direction of
    writing.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def steerless(text: str) -> str:
    """`text` that cannot steer a terminal, for answers and pages.

    Control characters and marks that turn the direction of writing are escaped. `escaped` would
    also escape wide spaces, and the joiners within emoji.
    """
    return STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(line: str, longest: int) -> str:
    """A line without its middle, if it is too long."""
    if len(line) <= longest:
        return line
    return f"{line[: longest * 3 // 4]} ... {line[len(line) - longest // 4 + 5 :]}"
