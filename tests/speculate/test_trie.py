"""The trie against counts by hand; its size; its file, damaged in every way."""

import signal
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cetane.errors import CetaneError
from cetane.speculate.trie import Trie

OWNER, OTHER = "ab" * 32, "cd" * 32
texts = st.lists(st.lists(st.integers(0, 4), max_size=30), max_size=4)


def runs(texts: list[list[int]], depth: int) -> Counter[tuple[int, ...]]:
    """How often every run of up to `depth` tokens occurs."""
    return Counter(
        tuple(text[start:stop])
        for text in texts
        for start in range(len(text))
        for stop in range(start + 1, min(start + depth, len(text)) + 1)
    )


def counts(trie: Trie) -> dict[tuple[int, ...], int]:
    """What the trie holds, walked from its nodes to the root."""
    found = {}
    for node in range(1, len(trie)):
        run, above = [], node
        while above:
            run.append(trie.token[above])
            above = trie.parent[above]
        found[tuple(reversed(run))] = trie.count[node]
    return found


@given(texts=texts, depth=st.integers(2, 6))
def test_counts(texts: list[list[int]], depth: int) -> None:
    trie = Trie(depth, 1000)
    for text in texts:
        assert trie.insert(text) is trie
    expected = runs(texts, depth)
    assert counts(trie) == expected
    for run, count in expected.items():
        node = trie.find(run)
        assert node is not None
        assert trie.count[node] == count
    assert trie.find([9]) is None


def test_follow() -> None:
    trie = Trie(4, 100)
    for text in ([1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 5, 6]):
        trie.insert(text)
    node = trie.find([1])
    assert node is not None
    tokens, parents, expected = trie.follow(node, 5, 0.1)
    assert (tokens, parents) == ([2, 3], [-1, 0])
    assert expected == pytest.approx(3 / 4 + 2 / 4)
    tokens, parents, expected = trie.follow(node, 4, 0.1, branches=True)
    assert tokens[:2] == [2, 3]
    assert parents[:2] == [-1, 0]
    assert {*zip(tokens[2:], parents[2:], strict=True)} <= {(5, -1), (4, 0), (6, 2)}
    assert expected == pytest.approx(3 / 4 + 2 / 4 + 1 / 4 + 1 / 4)
    assert trie.follow(node, 1, 0.1)[0] == [2]
    assert trie.follow(node, 5, 0.6) == ([2], [-1], 3 / 4)
    assert trie.follow(node, 5, 0.8) == ([], [], 0)
    trie.insert([1, 5])
    trie.insert([1, 5])
    assert trie.follow(node, 1, 0)[0] == [5]  # as often, and newer


@given(texts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=60), max_size=12))
def test_a_full_trie_keeps_what_is_met_most(texts: list[list[int]]) -> None:
    trie = Trie(4, 60)
    trie.insert([7, 7, 7, 7] * 5)
    for text in texts:
        before, earlier = counts(trie), trie
        trie = trie.insert(text)
        assert len(trie) <= 60
        assert earlier is trie or len(earlier) >= len(before)
        found = counts(trie)
        assert {run[:-1] for run in found if len(run) > 1} <= set(found)
        for run, count in found.items():
            assert len(run) == 1 or found[run[:-1]] >= count
        for node in range(len(trie)):
            children = [c for c in range(1, len(trie)) if trie.parent[c] == node]
            counted = sorted((trie.count[c] for c in children), reverse=True)
            likeliest = [c for c in (trie.best[node], trie.second[node]) if c]
            assert [trie.count[c] for c in likeliest] == counted[:2]
            assert len({*likeliest}) == len(likeliest)


def test_memory_stays_bounded() -> None:
    """Whatever is inserted: 40 times what the trie can hold. (A benchmark inserts a million.)"""
    rng = np.random.default_rng(0)
    tracemalloc.start()
    trie, sizes = Trie(8, 2000), []
    for _ in range(40):
        trie = trie.insert((rng.zipf(1.3, 250) % 50_000).tolist())
        assert len(trie) <= 2000
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert max(sizes[20:]) < 1.5 * max(sizes[:20])
    assert max(sizes) < 2000 * 400


@given(texts=texts)
def test_saved_and_loaded(tmp_path_factory, texts: list[list[int]]) -> None:
    path = tmp_path_factory.mktemp("trie") / "folder" / "trie"
    one, other = Trie(5, 300), Trie(5, 300)
    for text in texts:
        one = one.insert(text)
    one.save(path, OWNER)
    other.load(path, OWNER)
    assert counts(one) == counts(other)
    one.insert([1, 2, 3, 1])
    other.insert([1, 2, 3, 1])
    assert counts(one) == counts(other)
    assert one.clock == other.clock


def damage(content: bytes, kind: str) -> bytes:
    match kind:
        case "empty":
            return b""
        case "short":
            return content[:-1]
        case "long":
            return content + b"\0" * 4
        case "flipped":
            return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
        case "magic":
            return b"x" + content[1:]
        case "huge":
            return content + b"\0" * 100_000
    return content[:40]


@pytest.mark.parametrize("kind", ["empty", "short", "long", "flipped", "magic", "huge", "header"])
def test_a_damaged_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trie"
    trie = Trie(5, 300).insert([1, 2, 3, 4, 1, 2])
    trie.save(path, OWNER)
    path.write_bytes(damage(path.read_bytes(), kind))
    with pytest.raises(CetaneError) as error:
        Trie(5, 300).load(path, OWNER)
    assert str(path) in error.value.message
    assert error.value.hint


@pytest.mark.parametrize("row", range(4))
def test_a_file_that_was_forged(tmp_path: Path, row: int) -> None:
    """With a hash that is right."""
    path = tmp_path / "trie"
    trie = Trie(5, 300).insert([1, 2, 3, 4])
    column = (trie.parent, trie.token, trie.count, trie.used)[row]
    column[2] = -7
    trie.save(path, OWNER)
    with pytest.raises(CetaneError, match="not a suffix trie"):
        Trie(5, 300).load(path, OWNER)


def test_somebody_elses_tokens(tmp_path: Path) -> None:
    Trie().save(tmp_path / "trie", OWNER)
    with pytest.raises(CetaneError, match="another tokenizer"):
        Trie().load(tmp_path / "trie", OTHER)


def test_no_file_and_no_room(tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="cannot read"):
        Trie().load(tmp_path / "none", OWNER)
    with pytest.raises(CetaneError, match="has no room"):
        Trie(16, 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(CetaneError, match="cannot write"):
        Trie().save(tmp_path / "file" / "trie", OWNER)


def test_a_kill_while_saving_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "trie"
    Trie().insert([1, 2, 3]).save(path, OWNER)
    script = (
        "import sys; from pathlib import Path; from cetane.speculate.trie import Trie\n"
        "trie = Trie().insert(list(range(5000)))\n"
        "print('ready', flush=True)\n"
        f"while True: trie.save(Path(sys.argv[1]), {OWNER!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.013)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    found = Trie()
    found.load(path, OWNER)
    assert len(found) > 1
