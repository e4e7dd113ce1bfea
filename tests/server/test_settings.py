"""Settings that would never have an effect are refused."""

import math

import pytest

from cetane.errors import CetaneError
from cetane.server.settings import Settings
from cetane.validation import validated

ORIGINS = ("http://localhost:3000", "https://a.example", "chrome-extension://abc", "null", "*")
NONE = ("localhost:3000", "http://a.example/", "http://A.example", "http://a.example/chat", "")


def test_origins_as_browsers_send_them() -> None:
    assert Settings(origins=ORIGINS).origins == ORIGINS


@pytest.mark.parametrize("text", NONE)
def test_an_origin_that_no_browser_sends(text: str) -> None:
    with pytest.raises(CetaneError, match=r"origins\.0: .* is no origin, such as http://"):
        validated(Settings, {"origins": (text,)}, "settings")


def test_an_end_that_never_comes() -> None:
    with pytest.raises(CetaneError, match="grace"):
        validated(Settings, {"grace": math.inf}, "settings")
