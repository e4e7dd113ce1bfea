"""The threads of arithmetic: the environment's number, a task's, or one for each processor."""

import os
import threading

import pytest
import torch

from cetane.threads import available, beside, processors, threads


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


@pytest.mark.parametrize("threads_", ["1", "2"])
def test_work_beside_other_work(threads_: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one thread it is done when its result is asked for."""
    monkeypatch.setenv("OMP_NUM_THREADS", threads_)
    started, asked = threading.Event(), threading.Event()

    def work() -> bool:
        late = asked.is_set()
        started.set()
        return late

    with beside(work) as result:
        if threads_ == "2":
            assert started.wait(10)
        asked.set()
        assert result() == (threads_ == "1")


@pytest.mark.parametrize("threads_", ["1", "2"])
def test_what_fails_beside_other_work_is_raised(
    threads_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads_)

    def work() -> None:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"), beside(work) as result:
        result()
