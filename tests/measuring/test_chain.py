"""What an open bundle times: calls in memory that was used before, and decoding without prompts."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cetane.measuring import chain
from cetane.measuring.chain import ChainedRun


class Clocked:
    """A host whose clock is its work: 10 s for a prompt, 1 s for a step. New memory takes 5 s."""

    def __init__(self) -> None:
        self.plan = {"context": 8, "modes": {"verify": {"tokens": 3}}}
        self.now, self.calls = 0.0, list[str]()
        self.reset()

    def reset(self) -> None:
        self.new = True
        self.rewind()

    def rewind(self) -> None:
        self.position = 0

    def call(self, mode: str, tokens: list[int], logits: bool = True) -> Any:
        assert self.position + len(tokens) <= 8
        self.now += {"prefill": 10.0, "decode": 1.0, "verify": 2.0}[mode]
        self.now += 5.0 if self.new and mode == "verify" else 0.0
        self.new = False
        self.position += len(tokens)
        self.calls.append(mode)
        return np.eye(9)[: len(tokens)]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A bundle that is opened on such a host."""
    made: Any = object.__new__(ChainedRun)
    made.host = Clocked()
    made.probes = [{"prompt": [{"mode": "prefill", "tokens": [1, 2, 3, 4], "logits": True}]}]
    clock = SimpleNamespace(time=lambda: made.host.now, perf_counter=lambda: made.host.now)
    monkeypatch.setattr(chain, "time", clock)

    def clocked(work: Any) -> float:
        begun = made.host.now
        work()
        return float(made.host.now - begun)

    monkeypatch.setattr(chain, "clocked", clocked)
    return made


def test_verifying_calls_are_timed_in_memory_that_was_touched(opened: Any) -> None:
    made = opened.verifying()
    assert made["verify_tokens"] == 3
    assert (made["verify"]["min_ms"], made["verify"]["p95_ms"]) == (2.0, 2.0)


def test_the_load_for_a_power_meter_is_decoding_alone(opened: Any) -> None:
    assert opened.decode_for(20.0) == {"begun": 10.0, "ended": 30.0, "tokens": 20}
    assert opened.host.calls == ["prefill", *["decode"] * 20]
