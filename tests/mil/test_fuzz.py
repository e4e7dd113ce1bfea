"""A sample of the damaged packages that `tests.fuzz.packages` tries by the thousand."""

from collections import Counter
from pathlib import Path

import pytest
from tests.fuzz.packages import Case, check, make_seeds, mutate


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    return make_seeds(tmp_path_factory.mktemp("seeds"))


def test_good_packages_run(seeds: list[Case], tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    outcomes = [check(seed, tmp_path / "inner") for seed in seeds]
    # Loops have no ONNX form: the reference runs them.
    assert outcomes == ["ran", "ran", "ran", "fast export"]


def test_damaged_packages_are_refused_in_one_line(seeds: list[Case], tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    outcomes = Counter(check(mutate(seeds, number), tmp_path / "inner") for number in range(150))
    assert outcomes["refused"] > 50
    assert outcomes["ran"] > 10
