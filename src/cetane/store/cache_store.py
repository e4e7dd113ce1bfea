"""The store in the cache folder: results that later runs use again. A shared store gets them too.

The cache folder has a limit (`[store] limit` of `cetane.toml`). The results that were used longest
ago are forgotten first.
"""

import os
import tempfile
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import cache_dir, read_bytes, records, remove
from cetane.store.settings import settings, shared_store
from cetane.store.store import (
    LARGEST_LIST,
    Result,
    Store,
    made_beside,
    object_path,
    read_result,
    result_path,
)

DAY = 24 * 3600


def folder() -> Path:
    """The store in the cache folder."""
    return cache_dir() / "store"


def fetch(key: str, target: Path) -> bool:
    """Put the files of a result into `target`, which must not exist; False if nobody has made it.

    They are only for reading: the cache folder may share them.
    """
    own, shared = Store(folder(), private=True), shared_store()
    if own.fetch(key, target):
        with suppress(OSError):
            os.utime(folder() / result_path(key))  # used now
        return True
    if shared is None or not shared.fetch(key, target):
        return False
    _keep_here(own, key, target)
    return True


@contextmanager
def opened(key: str) -> Iterator[Path | None]:
    """A temporary folder with a result's files, while the context lasts; None if there is none."""
    with tempfile.TemporaryDirectory(prefix="cetane-kept-") as scratch:
        target = Path(scratch) / "result"
        yield target if fetch(key, target) else None


def keep(key: str, write: Callable[[Path], None], measured: bool = False) -> None:
    """Keep what `write` puts into an empty folder, here and in the shared store.

    Two machines may have `measured` other figures of one key: the first ones stay. It is no error
    if the cache folder cannot be written.
    """
    shared = shared_store()
    with suppress(OSError), made_beside(folder() / "kept") as made:
        write(made)
        _keep_here(Store(folder(), private=True), key, made)
        if shared is not None:
            shared.publish(key, made, records(made, made), measured)


def _keep_here(own: Store, key: str, made: Path) -> None:
    with suppress(OSError, CetaneError):
        own.publish(key, made, records(made, made))
        forget(settings().store.limit_bytes, keep=key)


def forget(limit: int, keep: str | None = None) -> None:
    """Forget the results that were used longest ago, until the rest has at most `limit` bytes.

    The result `keep` stays. Objects that other results list stay too.
    """
    results = sorted(results_here(), key=lambda item: item[0].stat().st_mtime, reverse=True)
    total, staying, leaving = 0, set[str](), dict[Path, Result]()
    for path, result in results:
        total += result.bytes
        if total > limit and result.key != keep:
            leaving[path] = result
        else:
            staying |= {record.sha256 for record in result.files.values()}
    for path, result in leaving.items():
        with suppress(OSError):
            remove(path)
            for record in result.files.values():
                if record.sha256 not in staying:
                    remove(folder() / object_path(record.sha256))
    forget_orphans(staying)


def forget_orphans(listed: Container[str]) -> None:
    """Remove what a killed process left more than a day ago: objects that are not `listed`, and
    folders that were not published."""
    left = [path for path in folder().glob("objects/*/*") if path.name not in listed]
    for path in [*left, *folder().glob(".kept*")]:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > DAY:
                remove(path)


def results_here() -> Iterator[tuple[Path, Result]]:
    """The results in the cache folder, each with the file that lists it."""
    for path in folder().glob("results/*/*.json"):
        with suppress(OSError, CetaneError):
            yield path, read_result(read_bytes(path, LARGEST_LIST, follow=False), path.stem)
