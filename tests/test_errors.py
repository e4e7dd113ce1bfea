"""Messages of errors are printable and short."""

from cetane.errors import LONGEST, CetaneError


def test_messages_are_printable_and_short() -> None:
    for text in ("\x1b" * 1000, "a\n\tb" * 500, "\ud800" * 299, "x" * 10**6):
        line = CetaneError(text).message
        assert line.isprintable() and 0 < len(line) <= LONGEST
