"""Workers: a lost one costs its task, an error ends no other task, results are checked."""

import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tests.tasks import work
from tests.tasks.work import Inline, task

from cetane.errors import CetaneError
from cetane.store.store import Store
from cetane.tasks import processes
from cetane.tasks.processes import Processes
from cetane.tasks.task import BESIDE, Order, Task, code_version, data_sha256
from cetane.tasks.workers import Workers, open_workers, performed

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find `tests` too."""
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", private=True)


def results(
    workers: Workers, tasks: list[Task], store: Store, tmp_path: Path
) -> dict[str, str | CetaneError]:
    """The text or the error of every task."""
    texts: dict[str, str | CetaneError] = {}

    def take(done: Task, store: Store) -> bool:
        folder = tmp_path / f"result-{done.name}"
        if not store.fetch(done.key, folder):
            return False
        texts[done.name] = (folder / "text").read_text()
        return True

    for done, error in performed(workers, tasks, store, take):
        if error is not None:
            texts[done.name] = error
    return texts


def jobs(tmp_path: Path) -> list[Task]:
    return [
        task("one", partial(work.write, "1")),
        task("refused", partial(work.refuse)),
        task("lost", partial(work.die_once, tmp_path / "marker")),
        task("two", partial(work.write, "2")),
    ]


def check(texts: dict[str, str | CetaneError]) -> None:
    refused = texts.pop("refused")
    assert isinstance(refused, CetaneError)
    assert (refused.message, refused.hint) == ("no such weight", "download it again")
    assert texts == {"one": "1", "two": "2", "lost": "whole"}


def test_processes(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_LOST", 1)
    with Processes(2) as workers:
        check(results(workers, jobs(tmp_path), store, tmp_path))
        deadly = [task("deadly", partial(work.die)), task("three", partial(work.write, "3"))]
        deadly.append(task("fault", partial(work.fail)))
        texts = results(workers, deadly, store, tmp_path)
    assert str(texts["fault"]) == "fault: ValueError: a fault of a library"
    assert texts["three"] == "3"
    assert "deadly: 2 workers died of this task" in str(texts["deadly"])


def test_dask(store: Store, tmp_path: Path) -> None:
    pytest.importorskip("distributed")
    with open_workers(2, "local") as workers:
        assert workers is not None and workers.dashboard is not None
        assert workers.dashboard.startswith("http")
        check(results(workers, jobs(tmp_path), store, tmp_path))


def test_a_cluster_needs_a_store_and_an_address() -> None:
    pytest.importorskip("distributed")
    with (
        pytest.raises(CetaneError, match="a store that all machines reach"),
        open_workers(None, "tcp://127.0.0.1:1"),
    ):
        pass


def test_a_result_that_is_there_is_not_made_again(store: Store, tmp_path: Path) -> None:
    first = [task("one", partial(work.write, "1"))]
    assert results(Inline(), first, store, tmp_path) == {"one": "1"}
    never = [Task("one", first[0].key, partial(work.refuse))]
    assert results(Inline(), never, store, tmp_path / "again") == {"one": "1"}


def test_a_damaged_result_is_made_again(store: Store, tmp_path: Path) -> None:
    first = task("one", partial(work.write, "1"))
    results(Inline(), [first], store, tmp_path)
    (stored,) = (tmp_path / "store").glob("objects/*/*")
    stored.unlink()
    stored.write_text("2")
    workers = Inline()
    assert results(workers, [first], store, tmp_path / "again") == {"one": "1"}
    assert workers.performed == ["one", "one"]


def test_a_store_that_damages_everything(store: Store, tmp_path: Path) -> None:
    one = task("one", partial(work.write, "1"))
    ((done, error),) = performed(Inline(), [one], store, lambda *_: False)
    assert done == one and "its result is damaged" in str(error)


def test_a_worker_with_other_code(store: Store) -> None:
    order = Order(store, None, "another")
    with pytest.raises(CetaneError, match="has another cetane"):
        order.perform(task("one", partial(work.write, "1")))
    assert code_version() != "another"


def test_a_wheel_and_a_checkout_have_one_version(tmp_path: Path) -> None:
    """A wheel has folders beside the code that a checkout has at its top."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {f"cetane/{name}" for name in BESIDE} == set(included.values())
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates/limits.toml").write_text("top1 = 0.9")
    checkout = data_sha256(tmp_path)
    data_sha256.cache_clear()
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/int8.toml").write_text("description = 'one of a wheel'")
    assert data_sha256(tmp_path) == checkout
    data_sha256.cache_clear()
    (tmp_path / "gates/limits.toml").write_text("top1 = 0.8")
    assert data_sha256(tmp_path) != checkout


def test_memory_and_time_keep_tasks_apart() -> None:
    workers = Processes(4, memory=100)
    small, large = (Task(str(m), "", partial(work.write, ""), memory=m) for m in (40, 90))
    timed = Task("timed", "", partial(work.write, ""), alone=True)
    assert workers.fits(small, [small]) and not workers.fits(large, [small])
    assert workers.fits(Task("huge", "", partial(work.write, ""), memory=200), [])
    assert not workers.fits(timed, [small]) and not workers.fits(small, [timed])
    assert workers.fits(timed, [])


def test_tasks_that_measure_time_have_a_process_with_all_cores(
    store: Store, tmp_path: Path
) -> None:
    """Also after another task: libraries keep the threads with which they started."""
    usual, timed = (task(name, partial(work.threads_at_first)) for name in ("usual", "timed"))
    tasks = [usual, replace(timed, cores=3, alone=True)]
    with Processes(1) as workers:
        assert results(workers, tasks, store, tmp_path) == {"usual": "1", "timed": "3"}


def test_no_workers() -> None:
    with open_workers() as workers:
        assert workers is None
    with pytest.raises(CetaneError, match="give 1 at least"):
        Processes(0)
