"""Text that waits for stop texts."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cetane.server.writing import HeldText

pieces = st.lists(st.text("abc", max_size=4), max_size=12)


@settings(max_examples=60, derandomize=True, database=None)
@given(pieces, st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
def test_text_ends_before_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    held, sent, text = HeldText(tuple(stops)), "", ""
    for piece in pieces:
        text += piece
        sent += held.push(piece)
        if held.stopped:
            break
    places = [text.find(stop) for stop in stops if stop in text]
    if places:
        assert held.stopped and sent == text[: min(places)]
    else:
        assert not held.stopped and sent + held.text == text
        assert all(stop not in sent for stop in stops)
        assert len(held.text) < max([len(stop) for stop in stops], default=1)
