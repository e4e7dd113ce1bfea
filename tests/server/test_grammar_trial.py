"""The trial of grammars: what it refuses, and whom a slow grammar does not stop."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from llguidance import LLMatcher
from tests.server.test_hostile import ASKED, connect, head, post

from cetane.errors import CetaneError
from cetane.server import grammar_trial
from cetane.server.lane import Lane
from cetane.server.schemas import json_grammar

CONSTRAINED = ASKED | {"response_format": {"type": "regex", "regex": "[a-z]+"}}


def chain(length: int) -> str:
    rules = "".join(f'x{i}: x{i + 1} "a" | "b"\n' for i in range(length))
    return str(LLMatcher.grammar_from_lark(f'start: x0\n{rules}x{length}: "a"'))


GRAMMARS = {
    "a schema": (json_grammar({"type": "object"}), True),
    "a wrong schema, which llguidance refuses itself": (json_grammar({"pattern": "("}), True),
    "a chain that overflows the stack": (chain(6000), False),
    "25 patterns at once": (json_grammar({"allOf": [{"type": "string", "pattern": f"a{i}"}
                                                    for i in range(25)]}), False),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_trial(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_trial, "SANDBOX", replace(grammar_trial.SANDBOX, seconds=1))
    grammar, passes = GRAMMARS[name]
    grammar_trial.check_compiles.cache_clear()
    if passes:
        grammar_trial.check_compiles(grammar)
    else:
        with pytest.raises(CetaneError, match="more than 5 s or 2 GB, or is nested too deeply"):
            grammar_trial.check_compiles(grammar)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An event until which no grammar compiles, and the grammars whose compilation began."""
    go_on, begun = threading.Event(), []

    def check(grammar: str) -> None:
        begun.append(grammar)
        go_on.wait(60)

    monkeypatch.setattr("cetane.server.asks.check_compiles", check)
    yield go_on, begun
    go_on.set()


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def leave_a_lane(
    lane: Lane, url: str, stuck: Any, ask: Callable[[], tuple[int, Any]], left: dict[str, Any]
) -> None:
    """Behind a request by `ask`, whose work is stuck, a client sends one that it leaves. Its work
    never begins."""
    go_on, begun = stuck
    body = json.dumps(left).encode()
    with ThreadPoolExecutor(1) as clients:
        first = clients.submit(ask)
        wait_for(lambda: len(begun) == 1)
        with connect(url) as leaving:
            leaving.sendall(head(len(body)) + body)
            wait_for(lambda: lane._inside == 2)
        wait_for(lambda: lane._inside == 1)
        go_on.set()
        assert first.result()[0] == 200
        assert ask()[0] == 200
    assert len(begun) == 2


def test_a_slow_grammar_delays_only_grammars(
    bundle: Any, serving: Callable[[Any], Any], stuck: Any
) -> None:
    from cetane.server.app import serve

    go_on, begun = stuck
    app = serve(bundle.path, queue=20)
    with serving(app) as url, ThreadPoolExecutor(21) as clients:
        slow = [clients.submit(post, url, CONSTRAINED) for _ in range(21)]
        wait_for(lambda: app.state.service.grammars._inside == 21)
        assert len(begun) == 1
        assert post(url, ASKED)[0] == 200
        status, answer = post(url, CONSTRAINED)
        assert status == 429
        assert answer["error"]["type"] == "rate_limit_error"
        assert answer["error"]["code"] == "queue_full"
        go_on.set()
        assert {one.result()[0] for one in slow} == {200}


def test_a_client_that_leaves_costs_no_compilation(
    bundle: Any, serving: Callable[[Any], Any], stuck: Any
) -> None:
    from cetane.server.app import serve

    app = serve(bundle.path)
    with serving(app) as url:
        ask = partial(post, url, CONSTRAINED)
        leave_a_lane(app.state.service.grammars, url, stuck, ask, CONSTRAINED)


def test_a_wait_for_a_grammar_counts_as_time_of_the_request(
    bundle: Any, serving: Callable[[Any], Any], stuck: Any
) -> None:
    from cetane.server.app import serve

    with serving(serve(bundle.path, seconds=0.5)) as url:
        for _ in range(2):  # one is compiling, and one waits
            status, answer = post(url, CONSTRAINED)
            assert (status, answer["error"]["code"]) == (503, "timeout")
    assert len(stuck[1]) == 1


def test_the_end_does_not_wait_for_a_grammar(
    bundle: Any, serving: Callable[[Any], Any], stuck: Any
) -> None:
    from cetane.server.app import serve

    body = json.dumps(CONSTRAINED).encode()
    with serving(serve(bundle.path)) as url:
        client = connect(url)
        client.sendall(head(len(body)) + body)
        wait_for(lambda: len(stuck[1]) == 1)
        client.close()
        started = time.monotonic()
    assert time.monotonic() - started < 10
