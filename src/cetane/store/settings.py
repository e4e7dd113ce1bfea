"""Settings of the store: `--store`, else `$CETANE_STORE`, else `[store]` of `cetane.toml` here."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from pydantic import Field

from cetane.files import read_toml
from cetane.store.store import Store
from cetane.validation import Data, validated

FILE = "cetane.toml"
VARIABLE = "CETANE_STORE"
_named: ContextVar[str | None] = ContextVar("store", default=None)


class StoreSettings(Data):
    """`[store]` of `cetane.toml`."""

    url: str | None = None
    """The shared store: a folder, or a URL of fsspec."""
    limit: str = Field(default="4GB", pattern=r"^[0-9]{1,6}(MB|GB)$")
    """Most bytes of results in the cache folder."""

    @property
    def limit_bytes(self) -> int:
        number, unit = self.limit[:-2], self.limit[-2:]
        return int(number) * (10**6 if unit == "MB" else 10**9)


class CetaneToml(Data):
    """`cetane.toml`."""

    store: StoreSettings = StoreSettings()


def settings() -> CetaneToml:
    """The settings in `cetane.toml` of the current folder; without the file, the defaults.

    Raises CetaneError for a file that is wrong.
    """
    path = Path(FILE)
    if not path.is_file():
        return CetaneToml()
    return validated(CetaneToml, read_toml(path), FILE)


@contextmanager
def using(url: str | None) -> Iterator[None]:
    """A context with a shared store; without a URL, the one that was there."""
    token = _named.set(url or _named.get())
    try:
        yield
    finally:
        _named.reset(token)


def shared_url() -> str | None:
    """The URL of the shared store, if there is one."""
    return _named.get() or os.environ.get(VARIABLE) or settings().store.url


def shared_store() -> Store | None:
    """The shared store, if there is one. Raises CetaneError for a URL that cetane does not know."""
    url = shared_url()
    return None if url is None else Store(url)


def check_store(url: str) -> None:
    """Raise CetaneError for a store that does not answer, before any work."""
    Store(url).find("0" * 64)
