"""Places of a store's files: a folder of this machine, or any file system that fsspec knows."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from cetane.errors import CetaneError
from cetane.files import open_regular, remove

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

PROTOCOLS = ("file", "memory", "http", "https", "s3", "gs", "hf")
"""fsspec's file systems that hold plain files: no chains, archives or links."""
HTTP = ("http", "https")
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
"""The package that fsspec needs for a protocol."""


class StorePlace(Protocol):
    """Files by relative names. Either a file appears whole, or nobody is told its name before it is
    whole."""

    def open(self, name: str) -> IO[bytes]:
        """A file for reading. Raises FileNotFoundError if there is none."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def put(self, source: Path, name: str) -> None:
        """Make a file with the content of `source`, which nobody may write to any more."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists and this process may."""


class Folder:
    """A folder of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open(self, name: str) -> IO[bytes]:
        return open_regular(self.root / name, follow=False)

    def size(self, name: str) -> int | None:
        try:
            status = (self.root / name).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if S_ISREG(status.st_mode) else None  # a link leads elsewhere

    def put(self, source: Path, name: str) -> None:
        """Every writer has a temporary name of its own, so two of them do no harm."""
        target = self.root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as folder:
            temporary = Path(folder) / "file"
            try:
                os.link(source, temporary)
            except OSError:  # another disk, or one without links
                shutil.copyfile(source, temporary)
            temporary.replace(target)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            remove(self.root / name)


class Remote:
    """A folder on a file system of fsspec: an object store's files appear whole."""

    def __init__(self, system: "AbstractFileSystem", root: str) -> None:
        self.system, self.root = system, root.rstrip("/")

    def open(self, name: str) -> IO[bytes]:
        return cast("IO[bytes]", self.system.open(f"{self.root}/{name}", "rb"))

    def size(self, name: str) -> int | None:
        self.system.invalidate_cache()  # of listings: others write too
        info = info_of(self.system, f"{self.root}/{name}")
        if info is None:
            return None
        if not isinstance(info["size"], int):
            raise CetaneError(
                f"{self.root}/{name}: the server does not tell its size",
                "it must send Content-Length; name another store",
            )
        return info["size"]

    def put(self, source: Path, name: str) -> None:
        path = f"{self.root}/{name}"
        self.system.makedirs(path.rpartition("/")[0], exist_ok=True)
        self.system.put_file(str(source), path)

    def remove(self, name: str) -> None:
        with suppress(Exception):  # file systems that are only read have errors of their own
            self.system.rm_file(f"{self.root}/{name}")


def info_of(system: "AbstractFileSystem", path: str) -> dict[str, Any] | None:
    """What a file system says of a file; None if there is none. Raises as `remote_errors`."""
    with remote_errors(f"cannot read {system.unstrip_protocol(path)}"):
        try:
            info: dict[str, Any] = system.info(path)
        except FileNotFoundError as error:
            fault = fault_of(error, path)
            if fault is None:
                return None
            raise fault from error
    return info


def fault_of(error: FileNotFoundError, path: str) -> BaseException | None:
    """Why there was no answer; None if the file is not there. fsspec says so too of a server that
    fails, or that cannot be reached."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return None if isinstance(cause, FileNotFoundError) else cause
    if split(path)[0] not in HTTP:
        return None
    from cetane.store.http import failed

    return cause if failed(cause) else None


def place_of(url: str) -> StorePlace:
    """The place of a URL or of a folder's path, which need not exist. Raises CetaneError for any
    other, and for a file."""
    protocol, path = split(url)
    if protocol == "file":
        folder = Path(path).expanduser().absolute()
        if folder.exists() and not folder.is_dir():
            raise CetaneError(f"{url}: no folder for a store, since a file is there")
        return Folder(folder)
    system, root = file_system(url)
    return Remote(system, root)


def split(url: str) -> tuple[str, str]:
    """The protocol of a URL and what follows it; `file` for a plain path."""
    protocol, separator, rest = url.partition("://")
    return (protocol, rest) if separator else ("file", url)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path there. Raises CetaneError if it is not known."""
    protocol, _ = split(url)
    if protocol not in PROTOCOLS or "::" in url:
        known = ", ".join(f"{name}://" for name in PROTOCOLS)
        raise CetaneError(f"{url}: no place that cetane reads", f"known: a folder, {known}")
    import fsspec  # here: most runs have no store

    with remote_errors(f"cannot open {url}"):
        try:
            system, path = fsspec.url_to_fs(url, **limits_of(protocol))
        except ImportError as error:
            package = PACKAGES.get(protocol, "huggingface-hub")
            raise CetaneError(f"{url}: {error}", f"pip install {package}") from error
    return system, str(path)


def limits_of(protocol: str) -> dict[str, Any]:
    """The options of fsspec's file system that limit what a server may send. Object stores are
    trusted to send what is asked for."""
    if protocol not in HTTP:
        return {}
    from cetane.store.http import client  # here: only these protocols need aiohttp

    return {"get_client": client}


@contextmanager
def remote_errors(what: str) -> Iterator[None]:
    """A context that turns the errors of networks and disks into CetaneErrors."""
    try:
        yield
    except (CetaneError, FileNotFoundError):
        raise
    except Exception as error:  # every file system has errors of its own
        raise CetaneError(
            f"{what}: {reason(error)}", "check the address, the network and the credentials"
        ) from error


def reason(error: Exception) -> str:
    """The first line of an error, or its kind. aiohttp has no words for too many redirects."""
    if type(error).__name__ == "TooManyRedirects":
        return "the server redirects again and again, and never gives the file"
    return (str(error).strip() or type(error).__name__).splitlines()[0]
