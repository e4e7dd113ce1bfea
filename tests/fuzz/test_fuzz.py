"""Every input that was ever found, and a slice of the fuzzers: each is read or refused, in one
printable line, in time."""

import os
from pathlib import Path
from random import Random

import pytest
from tests.fuzz.formats import FUZZERS
from tests.fuzz.fuzzer import contents
from tests.fuzz.run import CORPUS, GOOD, kept, outcome

SECONDS = float(os.environ.get("FUZZ_SECONDS", "6"))
"""CPU seconds of all slices together. The same inputs every time, as many as there is time for."""


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    monkeypatch.setattr("cetane.checkpoint.template_limits.SECONDS", 0.2)


def cpu_seconds() -> float:
    """Of this process and of those that it started: a tokenizer is tried in one."""
    return sum(os.times()[:4])


@pytest.mark.parametrize("kind", FUZZERS)
def test_damaged_inputs(kind: str) -> None:
    fuzzer = FUZZERS[kind]()
    for files in fuzzer.seeds:
        assert outcome(fuzzer, files) == "read"
    for folder in kept(kind):
        assert outcome(fuzzer, contents(folder)) in GOOD, folder
    end, number, refused = cpu_seconds() + SECONDS / len(FUZZERS), 0, 0
    while cpu_seconds() < end or not refused:
        ended = outcome(fuzzer, fuzzer.mutate(Random(number)))
        assert ended in GOOD, f"{kind} {number}: {ended}"
        number, refused = number + 1, refused + (ended == "refused")


def test_every_folder_of_the_corpus_is_of_a_format() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(FUZZERS)
