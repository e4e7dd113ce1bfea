"""A store: `results/KEY.json` lists the files of a result, `objects/SHA256` holds their content.

A key is a hash of everything that a result depends on. Objects come first, the list last, so what
is listed is whole. Nothing there is trusted by its name: a file's size and hash are checked while
it is copied, and what fails is removed and made again.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from cetane.errors import CetaneError
from cetane.files import (
    MOST_FILES,
    READ_ONLY,
    FileRecord,
    check_space,
    is_present,
    leads_elsewhere,
    nameable,
    sha256,
)
from cetane.store.places import Folder, StorePlace, place_of, remote_errors
from cetane.validation import Data, Sha256, parse_json, validated

LARGEST_LIST = 1 << 22
"""Bytes of the list of a result's files."""
PIECE = 1 << 20
"""Bytes that are copied at a time."""
log = logging.getLogger("cetane.store")


def plain_path(name: str) -> str:
    """A relative path of plain names. Raises ValueError for any other."""
    parts = PurePosixPath(name).parts
    odd = not parts or name != "/".join(parts) or any(p in ("/", "..", ".") for p in parts)
    if odd or "\\" in name or len(name) > 1024 or not nameable(name):
        raise ValueError(f"{name!r} is no path inside a folder")
    return name


class StoreFile(FileRecord):
    """The size and the hash of an object."""

    bytes: int = Field(ge=0, lt=1 << 50)
    sha256: Sha256


class Result(Data):
    """The files that a piece of work has made, by path."""

    schema_version: Literal[1] = 1
    key: Sha256
    files: dict[Annotated[str, AfterValidator(plain_path)], StoreFile] = Field(
        max_length=MOST_FILES
    )

    @model_validator(mode="after")
    def separate(self) -> "Result":
        """Refuse a file that is another one's folder."""
        folders = {str(path) for name in self.files for path in PurePosixPath(name).parents}
        if both := sorted(folders & self.files.keys()):
            raise ValueError(f"{both[0]!r} is a file and a folder")
        return self

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def result_path(key: str) -> str:
    return f"results/{key[:2]}/{key}.json"


def object_path(sha256: str) -> str:
    return f"objects/{sha256[:2]}/{sha256}"


def read_result(content: bytes, key: str) -> Result:
    """The list of a result's files. Raises CetaneError if it is none, or of another key."""
    result = validated(Result, parse_json(content, result_path(key)), result_path(key))
    if result.key != key:
        raise CetaneError(f"{result_path(key)} is the result of another key")
    return result


class Store:
    """The results at a place. A wrong file there is no error: it counts as missing."""

    def __init__(self, url: str | Path, private: bool = False) -> None:
        """The files of a `private` store may be linked, since nobody else reads them later.

        Raises CetaneError for a URL that cetane does not know.
        """
        self.url, self.private = str(url), private
        self.place: StorePlace = place_of(self.url)

    def find(self, key: str) -> Result | None:
        """The files of a result whose objects are all there; None if it is not."""
        name = result_path(key)
        with remote_errors(f"cannot read the store {self.url}"):
            size = self.place.size(name)
            if size is None:
                return None
            try:
                if size > LARGEST_LIST:
                    raise CetaneError(f"{name} has {size:,} bytes")
                with self.place.open(name) as file:
                    result = read_result(file.read(LARGEST_LIST), key)
            except FileNotFoundError:
                return None
            except CetaneError as error:
                self.refuse(name, error.message)
                return None
            if all(self._whole(record) for record in result.files.values()):
                return result
        return None

    def fetch(self, key: str, folder: Path) -> bool:
        """Copy a result's files into `folder`, which must not exist; False if it is not there.

        The folder appears whole, with content that was checked.
        """
        result = self.find(key)
        if result is None:
            return False
        with made_beside(folder) as partial:
            check_space(partial, result.bytes)
            for name, record in result.files.items():
                target = partial / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not self._copy(record, target):
                    return False
            partial.rename(folder)
        return True

    @contextmanager
    def opened(self, key: str, near: Path) -> Iterator[Path | None]:
        """A folder beside `near` with a result's files, while the context lasts; None if absent."""
        with made_beside(near) as scratch:
            folder = scratch / "result"
            yield folder if self.fetch(key, folder) else None

    def publish(
        self, key: str, folder: Path, made: Mapping[str, FileRecord], measured: bool = False
    ) -> bool:
        """Put files of `folder` into the store, by their paths there: objects, then the list.

        Whatever is there stays, if it is whole. False for a store that is only read. Raises
        CetaneError if another writer has made other files of the same key, unless they hold
        `measured` figures.
        """
        files = {name: StoreFile(**record.model_dump()) for name, record in made.items()}
        result, other = Result(key=key, files=files), self.find(key)
        if other is not None and other != result and not measured:
            differing = sorted(
                name for name in {*files, *other.files} if files.get(name) != other.files.get(name)
            )
            raise CetaneError(
                f"{self.url}: two workers made different results of {key[:16]}: {differing[0]}",
                "the first one stays; name another store, and report this",
            )
        if other is not None:
            return True
        with remote_errors(f"cannot write to the store {self.url}"):
            try:
                for name, record in files.items():
                    if not self._whole(record):
                        self.place.put(folder / name, object_path(record.sha256))
                self._put_text(result.model_dump_json(), result_path(key))
            except (OSError, NotImplementedError) as error:
                if isinstance(error, OSError) and error.errno not in READ_ONLY:
                    raise
                log.warning("%s: only read, since it cannot be written", self.url)
                return False
        return True

    def refuse(self, name: str, why: str) -> None:
        """Remove a file that is not what it should be, so that it is made again."""
        log.warning("%s: refused, and made again: %s", self.url, why)
        self.place.remove(name)

    def _whole(self, record: StoreFile) -> bool:
        return self.place.size(object_path(record.sha256)) == record.bytes

    def _copy(self, record: StoreFile, target: Path) -> bool:
        """Copy an object, if it is the one that its name says."""
        name = object_path(record.sha256)
        if self.private and isinstance(self.place, Folder) and record.bytes > PIECE:
            with suppress(OSError):  # such as another disk's
                os.link(self.place.root / name, target)
            if target.exists():
                if sha256(target) == record.sha256:
                    return True
                target.unlink()  # what is written there next would reach the store's own file
        digest, left = hashlib.sha256(), record.bytes
        with remote_errors(f"cannot read the store {self.url}"):
            try:
                with self.place.open(name) as source, target.open("wb") as copy:
                    while piece := source.read(min(PIECE, left + 1)):
                        left -= len(piece)
                        if left < 0:
                            break
                        digest.update(piece)
                        copy.write(piece)
            except FileNotFoundError:
                return False
        if left or digest.hexdigest() != record.sha256:
            self.refuse(name, f"{name} has another content")
            return False
        return True

    def _put_text(self, text: str, name: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "text"
            path.write_text(text, encoding="utf-8")
            self.place.put(path, name)


def store_of_job(folder: Path) -> Store:
    """The private store of one job. Raises CetaneError for links in its folder: those of a
    stranger lead elsewhere."""
    if is_present(folder) and leads_elsewhere(folder):
        raise CetaneError(f"cannot write {folder}: there are links in it", "move it away")
    return Store(folder, private=True)


@contextmanager
def made_beside(folder: Path) -> Iterator[Path]:
    """A context with an empty folder on the disk of `folder`, removed unless it was renamed.

    After a kill, its name tells the next writer of `folder` that it can go."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    mine = f".{folder.name}.{os.getpid()}-"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=mine, suffix=".tmp") as own:
        partial = Path(own) / "made"  # of the usual rights, which the folder around it lacks
        partial.mkdir()
        yield partial
