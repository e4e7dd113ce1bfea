"""Large requests wait for each other, and small ones for nobody."""

import asyncio
import gc
import http.client
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.test_grammar_trial import leave_a_lane, wait_for
from tests.server.test_hostile import ASKED, post

from cetane.bundle import Bundle
from cetane.server.app import serve
from cetane.server.errors import ApiError
from cetane.server.lane import Lane
from cetane.server.service import SMALL

TEXT = "a " * SMALL
LARGE: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [5] * SMALL},
    "/v1/completions": ASKED | {"prompt": [TEXT]},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": TEXT}]},
}


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An event until which no large request is parsed, and the sizes of those that began."""
    from cetane.server.bodies import parse

    go_on, begun = threading.Event(), []

    def waiting(kind: Any, body: bytes) -> Any:
        if len(body) > SMALL:
            begun.append(len(body))
            go_on.wait(60)
        return parse(kind, body)

    monkeypatch.setattr("cetane.server.app.parse", waiting)
    yield go_on, begun
    go_on.set()


@pytest.mark.parametrize("path", LARGE)
def test_large_requests_delay_only_large_ones(
    bundle: Bundle, serving: Callable[[Any], Any], stuck: Any, path: str
) -> None:
    """24 texts of 4 MB for `/tokenize` kept a conversation waiting for 107 s."""
    go_on, begun = stuck
    app = serve(bundle.path, queue=8)
    with serving(app) as url, ThreadPoolExecutor(9) as clients:
        slow = [clients.submit(post, url, LARGE[path], path) for _ in range(9)]
        wait_for(lambda: app.state.service.large._inside == 9)
        assert len(begun) == 1
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200
        assert post(url, ASKED)[0] == 200
        assert post(url, {"prompt": "a"}, "/tokenize")[1]["count"] > 0
        status, answer = post(url, LARGE[path], path)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        go_on.set()
        fits = "tokenize" in path  # a prompt must fit into the context
        assert {one.result()[0] for one in slow} == {200 if fits else 400}


def test_a_client_that_leaves_costs_no_preparation(
    bundle: Bundle, serving: Callable[[Any], Any], stuck: Any
) -> None:
    app = serve(bundle.path)
    with serving(app) as url:
        tokenize = partial(post, url, LARGE["/tokenize"], "/tokenize")
        leave_a_lane(app.state.service.large, url, stuck, tokenize, LARGE["/v1/completions"])


class Body:
    """The content of a request."""


def test_a_lane_holds_no_request_that_it_has_refused() -> None:
    """A body of 4 MB can make 0.1 GB of objects. They stayed until the next large request came."""
    held: list[weakref.ref[Body]] = []

    def work() -> None:
        body = Body()
        held.append(weakref.ref(body))
        raise ApiError(400, "the body is wrong")  # its traceback holds this frame

    async def prepare() -> None:
        with pytest.raises(ApiError):
            await Lane("large requests", 1).run(work)

    def freed() -> bool:
        gc.collect()
        return held[0]() is None

    asyncio.run(prepare())
    wait_for(freed)
