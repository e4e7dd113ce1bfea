"""Messages of errors are printable and short."""

import sys
import unicodedata

from cetane.errors import LONGEST, CetaneError, steerless


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
