"""Messages of errors are printable and short."""

import sys
import time
import unicodedata

import pytest

from cetane.errors import LONGEST, CetaneError, printable, steerless


def test_messages_are_printable_and_short() -> None:
    for text in ("\x1b" * 1000, "a\n\tb" * 500, "\ud800" * 299, "x" * 10**6):
        line = CetaneError(text).message
        assert line.isprintable() and 0 < len(line) <= LONGEST


def test_a_terminal_is_not_steered() -> None:
    assert steerless("a\x1b[2Jb\n\tc\x07\u202e") == "a\\x1b[2Jb\n\tc\\x07\\u202e"
    family = "👩\u200d👩\u200d👧"
    assert steerless(family) == family


def test_what_steers_a_terminal() -> None:
    """Unicode's own tables: controls, and what embeds, overrides or isolates a direction."""
    turning = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}
    for char in map(chr, range(sys.maxunicode + 1)):
        control = unicodedata.category(char) == "Cc" and char not in "\n\t"
        steers = control or unicodedata.bidirectional(char) in turning
        assert (steerless(char) != char) == steers, repr(char)


@pytest.mark.parametrize("blank", [" ", "\n", " \n", "\t"])
def test_many_blanks_take_no_time(blank: str) -> None:
    """The time was their number squared: 34 s for 40,000 blanks in the name of a model, in which
    the server answered nobody."""
    started = time.process_time()
    message = CetaneError(f"a{blank * 20_000}b").message
    assert time.process_time() - started < 1
    assert message.startswith("a") and message.endswith("b") and len(message) <= LONGEST


def test_line_ends_become_one_blank() -> None:
    assert printable(" a \r\n\t b  c\n\n d\n") == "a b  c d"
