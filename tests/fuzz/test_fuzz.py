"""A sample of the fuzzers: every damaged input is read or refused, in one printable line."""

from pathlib import Path
from random import Random

import pytest
from tests.fuzz.formats import FUZZERS
from tests.fuzz.run import outcome

COUNTS = {"tokenizer": 12, "config": 60, "template": 100}
"""Inputs of a format; a tokenizer is tried in a process of its own."""


@pytest.mark.parametrize("kind", FUZZERS)
def test_damaged_inputs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    monkeypatch.setattr("cetane.checkpoint.chat_template.SECONDS", 0.5)
    fuzzer, ends = FUZZERS[kind](), set()
    for number in range(COUNTS.get(kind, 300)):
        ended = outcome(fuzzer, fuzzer.mutate(Random(number)))
        assert ended in ("read", "refused"), f"{kind} {number}: {ended}"
        ends.add(ended)
    assert ends == {"read", "refused"}
