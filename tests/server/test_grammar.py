"""A grammar's constraint: what it says at llguidance's limits."""

from types import SimpleNamespace
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.server.grammar import GrammarConstraint


def test_a_grammar_that_fails_in_an_answer_is_no_end() -> None:
    """llguidance's mask then allows the stop token alone, as if the answer were whole."""
    failed: Any = SimpleNamespace(
        compute_bitmask=lambda: b"\x01", is_error=lambda: True, get_error=lambda: "too large\nmore"
    )
    with pytest.raises(CetaneError, match=r"the grammar failed: too large$"):
        GrammarConstraint(failed, 8).allowed()
