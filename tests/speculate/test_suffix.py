"""Drafts from earlier outputs, which a thread inserts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.speculate.suffix import Suffix
from cetane.speculate.trie import Trie

OWNER = "00" * 32


def told(drafter: Suffix, *texts: list[int]) -> Suffix:
    """The drafter after some outputs, each of a session of its own, all inserted."""
    for text in texts:
        drafter.begin(SimpleNamespace(position=0), text[:1])
        drafter.extend(text[1:])
        drafter.end()
    drafter.close()
    return drafter


def asked(drafter: Suffix, tokens: list[int], most: int = 8) -> tuple[tuple[int, ...], str]:
    session: Any = SimpleNamespace(position=0)
    drafter.begin(session, tokens)
    draft = drafter.propose(most)
    return draft.tokens, draft.kind


def test_what_came_after_the_longest_suffix() -> None:
    drafter = told(Suffix(), [1, 2, 3, 4, 5], [9, 3, 7, 7, 7], [8, 3, 7, 7, 7])
    assert asked(drafter, [1, 2, 3]) == ((4, 5), "suffix-3")
    assert asked(drafter, [1, 2, 3], 1) == ((4,), "suffix-3")
    assert asked(drafter, [5, 3])[0][:2] == (7, 7)  # two of three
    assert asked(drafter, [6]) == ((), "")


def test_drafts_end_where_they_get_unlikely() -> None:
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 6], [1, 2, 7, 7]]
    assert asked(told(Suffix(threshold=0.5), *texts), [1])[0] == (2, 3)
    assert asked(told(Suffix(threshold=0.6), *texts), [1])[0] == (2,)
    assert asked(told(Suffix(threshold=0.1), *texts), [1])[0] == (2, 3, 5)


def test_only_what_the_model_said_is_learned_with_what_led_to_it() -> None:
    drafter = Suffix(Trie(4, 1000))
    session: Any = SimpleNamespace(position=0)
    drafter.begin(session, [1, 2, 3, 4, 5])
    drafter.extend([6, 7])
    drafter.end()
    session.position = 7
    drafter.begin(session, [8, 9])  # the conversation goes on
    drafter.extend([10])
    drafter.end()
    drafter.close()
    known = [run for run in ([1], [3], [4, 5, 6, 7], [7, 8], [8, 9, 10]) if drafter.trie.find(run)]
    assert known == [[4, 5, 6, 7], [8, 9, 10]]


def test_it_lasts_from_run_to_run(tmp_path: Path) -> None:
    path = tmp_path / "suffixes"
    told(Suffix(path=path, owner=OWNER), [1, 2, 3, 4])
    assert asked(Suffix(path=path, owner=OWNER), [1, 2]) == ((3, 4), "suffix-2")
    with pytest.raises(CetaneError, match="another tokenizer"):
        Suffix(path=path, owner="11" * 32)
