"""A server on a tiny bundle, in a thread of this process, and clients of other people for it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from cetane.bundle import Bundle
from cetane.server.app import serve
from cetane.server.run import Server, bind, config_of


@pytest.fixture(scope="session")
def bundle(chat_bundle: Bundle) -> Bundle:
    return chat_bundle


@contextmanager
def running(app: Any) -> Iterator[str]:
    """The address of a server that runs an application."""
    bound = bind("127.0.0.1", 0)
    server = Server(config_of(app), app.state.service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="session")
def application(bundle: Bundle) -> Any:
    return serve(bundle.path, queue=40, body_bytes=200_000, body_seconds=1, choices=8)


@pytest.fixture(scope="session")
def url(application: Any) -> Iterator[str]:
    """The address of the server."""
    with running(application) as address:
        yield address


@pytest.fixture(scope="session")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def serving() -> Callable[[Any], Any]:
    """`with serving(app) as address`: another server, with other settings."""
    return running
