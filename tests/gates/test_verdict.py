"""Shares come with intervals, and pass only where the low end does."""

import pytest

from cetane.gates.verdict import at_least, at_most, share, wilson


def test_wilson_by_the_textbook() -> None:
    """R. G. Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263 and 0 of 20."""
    assert wilson(81, 263, 0.95) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20, 0.95) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(20, 20, 0.95) == pytest.approx((0.8389, 1.0), abs=1e-4)
    assert wilson(0, 0, 0.95) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("hits", "count", "passed", "decided"),
    [
        (69, 77, False, False),  # 0.896 of 0.900: counting errs by more than that
        (256, 256, True, True),
        (240, 256, True, True),
        (100, 256, False, True),
        (0, 0, False, False),
    ],
)
def test_a_share_is_decided_where_its_interval_is_clear(
    hits: int, count: int, passed: bool, decided: bool
) -> None:
    check = share("x", hits, count, 0.9, 0.95)
    assert (check.passed, check.decided) == (passed, decided)


def test_plain_checks() -> None:
    assert at_least("x", 0.9, 0.9).passed
    assert not at_least("x", float("nan"), 0.9).passed
    assert at_most("x", 0.9, 0.9).passed
    assert not at_most("x", float("nan"), 1e9).passed
    assert not at_most("x", float("inf"), 1e9).passed
    assert at_most("x", 0.5, 0.9).decided


def test_a_share_above_its_limit_is_shown_with_the_interval_that_fails_it() -> None:
    failed = share("greedy tokens", 51, 64, limit=0.7, confidence=0.95)
    assert failed.value > failed.limit and not failed.passed
    assert failed.between == " (0.683 to 0.877)"
    assert at_most("KL", 0.1, 0.2).between == ""
