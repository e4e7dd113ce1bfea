"""Clients that do wrong: each gets a clear answer or a clean end, and the next is served."""

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

ASKED = {"model": "tiny", "prompt": "the rating", "max_tokens": 2, "seed": 1}
LONG = ASKED | {"max_tokens": 900, "logit_bias": {"0": -100}}
JSON = {"Content-Type": "application/json"}

Answer = tuple[int, Any]


def post(
    url: str, body: bytes | dict[str, Any], path: str = "/v1/completions", **headers: str
) -> Answer:
    """The status and the JSON of an answer."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    connection.request("POST", path, content, JSON | headers)
    response = connection.getresponse()
    status, text = response.status, response.read()
    connection.close()
    return status, json.loads(text)


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=20)


def head(length: int) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json",
             f"Content-Length: {length}", "", ""]  # fmt: skip
    return "\r\n".join(lines).encode()


def metric(url: str, name: str, **headers: str) -> float:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("GET", "/metrics", headers=headers)
    lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def idle(url: str, seconds: float) -> bool:
    """Whether the server has nothing to do within some seconds."""
    end = time.monotonic() + seconds
    while metric(url, "cetane_running_requests") + metric(url, "cetane_queue_requests"):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture(autouse=True)
def the_next_is_served(url: str) -> Iterator[None]:
    yield
    status, answer = post(url, ASKED)
    assert status == 200 and answer["usage"]["completion_tokens"] == 2


def asked(**fields: Any) -> bytes:
    return json.dumps(ASKED | fields).encode()


def deep(depth: int) -> bytes:
    return b'{"model": "tiny", "prompt": ' + b"[" * depth + b"]" * depth + b"}"


BODIES = {
    "no JSON": (b"{", 400, "not valid JSON"),
    "a list": (b"[]", 400, "not a JSON object"),
    "invalid UTF-8": (b'{"model": "\xff\xfe"}', 400, "not valid JSON"),
    "a lone surrogate": (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "half a character"),
    "deeply nested": (deep(50_000), 400, "too deeply nested"),
    "many digits": (b'{"seed": 1' + b"0" * 60 + b"}", 400, "digits"),
    "a field twice": (b'{"model": "tiny", "prompt": "a", "prompt": "b"}', 400, "appears twice"),
    "NaN": (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "temperature"),
    "a body that is too large": (b" " * 300_000, 413, "more than 200000 bytes"),
    "no prompt": (b'{"model": "tiny"}', 400, "prompt"),
    "an empty prompt": (b'{"model": "tiny", "prompt": []}', 400, "no tokens"),
    "a token that is none": (b'{"model": "tiny", "prompt": [999]}', 400, "token 999"),
    "a huge token": (b'{"model": "tiny", "prompt": [1' + b"0" * 30 + b"]}", 400, "prompt"),
    "a bias for a number": (asked(logit_bias={"9" * 5000: 1}), 400, "logit_bias: no token"),
    "a stop that is no text": (asked(stop="\ud800"), 400, "half a character"),
    "a regex that is no text": (
        asked(response_format={"type": "regex", "regex": "\ud800"}), 400, "half a character"
    ),
    "a grammar that is no text": (
        asked(response_format={"type": "grammar", "grammar": "\ud800"}), 400, "half a character"
    ),
    "many choices": (json.dumps(ASKED | {"n": 10_000}).encode(), 400, "n: at most 8"),
    "a long prompt": (json.dumps(ASKED | {"prompt": [5] * 1025}).encode(), 400, "1025 tokens"),
    "many prompts": (json.dumps(ASKED | {"prompt": ["x"] * 300}).encode(), 400, "256 prompts"),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_a_bad_body(url: str, name: str) -> None:
    body, status, message = BODIES[name]
    got, answer = post(url, body)
    assert got == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert message in answer["error"]["message"]


def test_a_fault_of_the_server(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: Any) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("cetane.server.app.completion_asks", fault)
        status, answer = post(url, ASKED)
    assert status == 500
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "server_error"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def crossed(width: int) -> dict[str, Any]:
    """All of ten times any of `width`: as a grammar it has `width ** 10` ways."""

    def one(i: int, j: int) -> dict[str, Any]:
        return {"properties": {f"{i}-{j}": {"type": "string"}}, "required": [f"{i}-{j}"]}

    return {"allOf": [{"anyOf": [one(i, j) for j in range(width)]} for i in range(10)]}


SCHEMAS = {
    "nested": nested(40),
    "crossed": crossed(9),
    "itself": {"$ref": "#"},
    "a large pattern": {"type": "string", "pattern": "((a{1,900}){1,900}b){1,900}"},
    "elsewhere": {"$ref": "http://localhost/schema.json"},
    "a large enum": {"enum": [f"value {i}" for i in range(9000)]},
    "no sense": {"type": "sandwich"},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_that_explodes(url: str, name: str) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMAS[name]}}
    started = time.monotonic()
    status, answer = post(url, ASKED | {"response_format": asked})
    assert time.monotonic() - started < 10
    assert status in (200, 400)
    if status == 400:
        assert answer["error"]["param"] == "response_format"


def test_a_body_that_does_not_come(url: str) -> None:
    for content in (b"", b'{"model":'):
        with connect(url) as client:
            client.sendall(head(1000) + content)
            assert b"408" in client.recv(1000)


def test_a_client_that_sends_half_a_body_and_leaves(url: str) -> None:
    with connect(url) as client:
        client.sendall(head(1000) + b'{"model":')
    assert idle(url, 1)


def test_a_body_without_a_length(url: str) -> None:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    pieces = (b" " * 50_000 for _ in range(20))
    with suppress(BrokenPipeError, ConnectionResetError):  # it may refuse before all is sent
        connection.request("POST", "/v1/completions", pieces, JSON, encode_chunked=True)
    assert connection.getresponse().status == 413


def test_a_hundred_megabytes(url: str) -> None:
    with connect(url) as client:  # refused by its length, before it is sent
        client.sendall(head(100_000_000))
        assert b"413" in client.recv(1000)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(url: str, stream: bool) -> None:
    left = metric(url, 'cetane_requests_total{end="left"')
    body = json.dumps(LONG | {"stream": stream}).encode()
    with connect(url) as client:
        client.sendall(head(len(body)) + body)
        if stream:
            assert b"200 OK" in client.recv(1000)
        else:
            while not metric(url, "cetane_running_requests"):
                time.sleep(0.001)
    assert idle(url, 0.5)
    assert metric(url, 'cetane_requests_total{end="left"') == left + 1


def test_other_methods_paths_and_types(url: str) -> None:
    got, answer = post(url, {}, "/v1/models")
    assert (got, answer["error"]["message"]) == (405, "Method Not Allowed: POST /v1/models")
    for path in ("/v1/responses", "/v1/embeddings"):
        got, answer = post(url, {}, path)
        assert got == 404  # a client of OpenAI's takes a 404 without a path for a missing model
        told, _, known = answer["error"]["message"].partition("; known: ")
        assert told == f"Not Found: POST {path}"
        for route in known.split(", "):
            assert post(url, {}, route)[0] in (400, 405)
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("HEAD", "/health")  # as many monitors ask
    assert connection.getresponse().status == 200
    connection.close()
    status, answer = post(url, ASKED, **{"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in answer["error"]["message"]


def test_an_offer_of_a_websocket(
    bundle: Any, serving: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library for them was installed, each left a traceback when its time was over."""
    from cetane.server.app import serve

    monkeypatch.setattr("uvicorn.protocols.websockets.auto.AutoWebSocketsProtocol", pytest.fail)
    with serving(serve(bundle.path)) as url:
        offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
                 "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
        assert post(url, ASKED, **offer)[0] == 200  # RFC 9110, 7.8: a server may ignore the offer


def test_key_hosts_origins_and_a_full_queue(bundle: Any, serving: Callable[[Any], Any]) -> None:
    from cetane.server.app import serve

    app = serve(bundle.path, queue=1, api_key="sésame", hosts=("127.0.0.1",), speculation=False,
                origins=("http://friend.example",), max_tokens=1000, prefixes=0)  # fmt: skip
    key = {"Authorization": "Bearer sésame".encode().decode("latin-1")}
    with serving(app) as url:
        for wrong in ({}, {"Authorization": "Bearer x"}, {"Authorization": "sésam"}):
            status, answer = post(url, ASKED, **wrong)
            assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        for scheme in ("bearer", "BEARER", "Bearer "):  # RFC 9110, 11.1 and 11.4
            sent = {"Authorization": key["Authorization"].replace("Bearer", scheme)}
            assert post(url, ASKED, **sent)[0] == 200
        assert post(url, ASKED | {"max_tokens": 2000}, **key)[1]["error"]["param"] == "max_tokens"
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        for host, status in (("evil.example", 400), ("127.0.0.1", 200)):
            connection.request("GET", "/health", headers={"Host": host})
            response = connection.getresponse()
            response.read()
            assert response.status == status
        for origin in ("http://friend.example", "http://other.example"):
            connection.request("GET", "/health", headers={"Origin": origin})
            response = connection.getresponse()
            response.read()
            allowed = response.headers["Access-Control-Allow-Origin"]
            assert (allowed == origin) == ("friend" in origin)
            asks = {"Origin": origin, "Access-Control-Request-Method": "POST",
                    "Access-Control-Request-Headers": "authorization,x-stainless-os"}  # fmt: skip
            connection.request("OPTIONS", "/v1/completions", headers=asks)
            response = connection.getresponse()
            response.read()
            assert (response.status == 200) == ("friend" in origin)
        body = json.dumps(LONG | {"stream": True}).encode()
        extra = b"Authorization: Bearer s\xc3\xa9same\r\n\r\n"
        with connect(url) as one, connect(url) as two:
            for client in (one, two):
                client.sendall(head(len(body))[:-2] + extra + body)
                if client is one:
                    assert b"200 OK" in client.recv(1000)
            while not metric(url, "cetane_queue_requests", **key):  # `two` needs a moment
                time.sleep(0.001)
            status, answer = post(url, ASKED, **key)
            assert status == 429 and answer["error"]["type"] == "rate_limit_error"
        while post(url, ASKED, **key)[0] == 429:
            pass
        assert post(url, ASKED, **key)[0] == 200


# RFC 9110, 7.2: a name or an address, and perhaps a port, which may be empty (RFC 3986, 3.2.3).
HOSTS = {"127.0.0.1": True, "127.0.0.1:8000": True, "LOCALHOST:8000": True, "localhost:": True,
         "[::1]": True, "[::1]:8000": True, "::1": False, "": False, "evil.example": False,
         "127.0.0.1.evil.example": False, "evil.example:127.0.0.1": False, "x@127.0.0.1": False,
         "127.0.0.1, evil.example": False, "localhost/": False}  # fmt: skip


def test_other_hosts_get_an_error_of_the_api(bundle: Any, serving: Callable[[Any], Any]) -> None:
    from cetane.cli.serve import LOCAL
    from cetane.server.app import serve

    with serving(serve(bundle.path, hosts=LOCAL)) as url:
        for host, known in HOSTS.items():
            status, answer = post(url, ASKED, Host=host)
            assert status == (200 if known else 400), host
            if not known:
                assert set(answer["error"]) == {"message", "type", "param", "code"}
                assert "only to 127.0.0.1, localhost, ::1; start" in answer["error"]["message"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0,
                               default_headers={"Host": "mybox.local"})  # fmt: skip
        with pytest.raises(openai.BadRequestError, match="another --host"):
            client.models.list()


def test_an_application_inside_another(bundle: Any, serving: Callable[[Any], Any]) -> None:
    """Nobody tells a mounted application that it begins."""
    from fastapi import FastAPI

    from cetane.server.app import serve

    inner, outer = serve(bundle.path), FastAPI()
    outer.mount("/inner", inner)
    outer.state.service = inner.state.service
    with serving(outer) as url:
        assert post(url, ASKED, "/inner/v1/completions")[0] == 200


def test_an_application_that_runs_again(bundle: Any, serving: Callable[[Any], Any]) -> None:
    from cetane.server.app import serve

    app = serve(bundle.path)
    for _ in range(2):
        with serving(app) as url:
            assert post(url, ASKED)[0] == 200
