"""Drafts from earlier outputs, which a thread inserts."""

import gc
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.speculate.suffix import EarlierAnswers, Suffix

OWNER = "00" * 32


def session(position: int = 0, adapter: str | None = None, no_trees: str | None = "lines") -> Any:
    return SimpleNamespace(position=position, adapter=adapter, no_trees=no_trees)


def told(drafter: Suffix, *texts: list[int], adapter: str | None = None) -> Suffix:
    """The drafter after some answers, each of a session of its own, all inserted."""
    for text in texts:
        drafter.begin(session(adapter=adapter), text[:1])
        drafter.extend(text[1:])
        drafter.end()
    drafter.close()
    return drafter


def fresh(threshold: float = 0.1) -> Suffix:
    return Suffix(EarlierAnswers(), threshold)


def asked(drafter: Suffix, tokens: list[int], most: int = 8, **how: Any) -> tuple[Any, str]:
    drafter.begin(session(**how), tokens)
    draft = drafter.propose(most)
    return draft.tokens, draft.kind


def test_what_came_after_the_longest_suffix() -> None:
    drafter = told(fresh(), [1, 2, 3, 4, 5], [9, 3, 7, 7, 7], [8, 3, 7, 7, 7])
    assert asked(drafter, [1, 2, 3]) == ((4, 5), "suffix-3-once")
    assert asked(drafter, [1, 2, 3], 1) == ((4,), "suffix-3-once")
    assert asked(drafter, [5, 3])[0][:2] == (7, 7)  # two of three
    assert asked(drafter, [5, 3])[1] == "suffix-1"
    assert asked(drafter, [6]) == ((), "")


def test_drafts_end_where_they_get_unlikely() -> None:
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 6], [1, 2, 7, 7]]
    assert asked(told(fresh(0.5), *texts), [1])[0] == (2, 3)
    assert asked(told(fresh(0.6), *texts), [1])[0] == (2,)
    assert asked(told(fresh(0.1), *texts), [1])[0] == (2, 3, 5)


def test_branches_where_the_session_takes_trees() -> None:
    texts = [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 6, 8]]
    drafter = told(fresh(), *texts)
    drafter.begin(session(no_trees=None), [1])
    draft = drafter.propose(5)
    assert (draft.tokens, draft.parents) == ((2, 3, 4, 6, 8), (-1, 0, 1, 0, 3))
    drafter.begin(session(), [1])
    assert drafter.propose(5).parents == (-1, 0, 1)


def test_only_what_the_model_said_is_learned_with_what_led_to_it() -> None:
    answers = EarlierAnswers()
    drafter, one = Suffix(answers), session()
    drafter.begin(one, list(range(1, 12)))
    drafter.extend([12, 13])
    drafter.end()
    one.position = 13
    drafter.begin(one, [14, 15])  # the conversation goes on
    drafter.extend([16])
    drafter.end()
    drafter.end()  # nothing new
    drafter.close()
    runs = ([1], [3], [4, 5, 6], [11, 12, 13], [13, 14, 15, 16])
    known = [run for run in runs if answers.trie(None).find(run)]
    assert known == [[4, 5, 6], [11, 12, 13], [13, 14, 15, 16]]
    assert answers.trie(None).count[answers.trie(None).find([16]) or 0] == 1


def test_another_drafter_knows_earlier_answers_of_its_own_adapter() -> None:
    answers = EarlierAnswers()
    told(Suffix(answers), [1, 2, 3], adapter="poet")
    assert asked(Suffix(answers), [1, 2], adapter="poet")[0] == (3,)
    assert asked(Suffix(answers), [1, 2])[0] == ()


def test_it_leaves_no_thread() -> None:
    """A program may load many models without closing one."""
    before = threading.active_count()
    for _ in range(3):
        EarlierAnswers().add(None, [1, 2, 3])
    gc.collect()
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_it_lasts_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "suffixes"
    told(Suffix(EarlierAnswers(path, OWNER)), [1, 2, 3, 4])
    known = Suffix(EarlierAnswers(path, OWNER))
    assert asked(known, [1, 2]) == ((3, 4), "suffix-2-once")
    with pytest.raises(CetaneError, match="another tokenizer"):
        EarlierAnswers(path, "11" * 32)


def test_a_cache_that_takes_no_file_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer that it would have learned is complete."""
    (tmp_path / "file").write_bytes(b"")
    told(Suffix(EarlierAnswers(tmp_path / "file" / "x.trie", OWNER)), [1, 2, 3, 4])
    (warning,) = caplog.messages
    assert warning.startswith("these answers are not kept for the next run: cannot write ")
