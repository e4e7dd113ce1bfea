"""The threads of arithmetic: the environment's number, a task's, or one for each processor."""

import os

import pytest
import torch

from cetane.threads import available, processors, threads


def test_a_task_has_its_threads() -> None:
    before = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    with threads(3):
        assert torch.get_num_threads() == 3 and os.environ["OMP_NUM_THREADS"] == "3"
        assert available() == 3
    assert before == (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))


@pytest.mark.parametrize(("asked", "count"), [("5", 5), ("0", None), ("", None), ("2,4", None)])
def test_the_environment_decides(
    asked: str, count: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    assert available() == (count or processors())
