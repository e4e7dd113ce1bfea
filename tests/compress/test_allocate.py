"""The best choice of formats, against all choices."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from cetane.compress.allocate import UNITS, Option, allocate

options = st.lists(
    st.tuples(st.integers(1, 60), st.integers(0, 1000)), min_size=1, max_size=4, unique=True
).map(lambda pairs: [Option(f"{size}", size, harm / 16) for size, harm in pairs])


@given(groups=st.lists(options, min_size=1, max_size=4), budget=st.integers(0, 250))
def test_no_other_choice_is_better(groups: list[list[Option]], budget: int) -> None:
    fitting = [c for c in product(*groups) if sum(o.nbytes for o in c) <= budget]
    chosen = allocate(groups, budget)
    if not fitting:
        assert chosen is None
        return
    assert chosen is not None
    assert all(option in group for option, group in zip(chosen, groups, strict=True))
    assert sum(option.nbytes for option in chosen) <= budget
    # Harms are sixteenths, so that sums are exact.
    assert sum(o.harm for o in chosen) == min(sum(o.harm for o in c) for c in fitting)


def test_sizes_beyond_the_number_of_units_are_rounded_up() -> None:
    """Never above the budget, and at most one unit a group below what would fit."""
    scale = 1000 * UNITS + 1
    groups = [[Option("small", 1 * scale, 9.0), Option("large", 2 * scale, 1.0)] for _ in range(3)]
    two = allocate(groups, 5 * scale + 3000)
    assert two is not None
    assert sum(option.nbytes for option in two) == 5 * scale
    most = allocate(groups, 6 * scale - 1)
    assert most is not None
    assert sum(option.nbytes for option in most) == 5 * scale
    assert [option.name for option in allocate(groups, 3 * scale) or []] == ["small"] * 3
    assert allocate(groups, 3 * scale - 1) is None


def test_step_by_step_would_be_worse() -> None:
    """The best gain per byte first leaves no room for the better pair."""
    first = [Option("a", 0, 10), Option("b", 6, 3.9)]  # 1.02 a byte
    second = [Option("a", 0, 10), Option("b", 5, 5)]  # 1 a byte
    third = [Option("a", 0, 10), Option("b", 5, 5)]
    chosen = allocate([first, second, third], 10)
    assert [option.name for option in chosen or []] == ["a", "b", "b"]
