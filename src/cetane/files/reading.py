"""Bounded reads of regular files: nothing blocks, and nothing is larger than it may be."""

import errno
import os
import stat
from contextlib import suppress
from importlib import resources
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.validation import Content, parse_json, parse_toml, validated

LARGEST = 1 << 26
"""The largest file that is read whole, in bytes. A released checkpoint's index has up to 10 MB."""
LARGEST_TEXT = 1 << 28
"""The largest text to judge or to train on, in bytes: 60 M tokens."""
LARGEST_TOML = 1 << 18
"""Bytes of the largest TOML file. A recipe has up to 8 kB; tomllib takes 3 s for 1 MB."""
_POINTER = b"version https://git-lfs.github.com/spec/"


def open_regular(path: Path, follow: bool = True) -> BufferedReader:
    """A regular file, opened for reading.

    Raises OSError for devices, pipes and folders, which could block or never end. Raises it for a
    link too, unless `follow`.
    """
    return open(regular(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW)), "rb")


def open_to_append(path: Path) -> BufferedRandom:
    """A regular file, opened for reading and appending; it is made if nothing is there.

    Raises CetaneError for anything else. A stranger's folder may hold a link to a file of the user,
    such as one that a shell reads at its start.
    """
    try:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        return open(regular(path, flags), "a+b")
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL):
            raise
        what = "a link" if path.is_symlink() else "no regular file"
        raise CetaneError(f"cannot write {path}: it is {what}", "move it away") from error


def regular(path: Path, flags: int) -> int:
    """The handle of a regular file. Raises OSError for any other, and does not wait for pipes."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def read_bytes(path: Path, most: int = LARGEST, follow: bool = True) -> bytes:
    """The content of a regular file of at most `most` bytes. Every file that is read whole comes
    through here.

    Raises CetaneError if it cannot be read, is larger, or is not a regular file. Files of untrusted
    folders, such as a bundle's, are opened with `follow=False`, which refuses links.
    """
    try:
        with open_regular(path, follow) as file:
            content = file.read(most + 1)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise CetaneError(f"cannot read {path}: {reason}") from error
    if len(content) > most:
        raise too_large(path, most)
    return content


def too_large(path: Path, most: int) -> CetaneError:
    return CetaneError(f"{path} is larger than the {most:,} bytes that such a file may have")


def read_text(path: Path, most: int = LARGEST) -> str:
    """The UTF-8 text of `path`. Raises CetaneError as `read_bytes`."""
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CetaneError(f"cannot read {path}: it is not UTF-8: {error}") from error


def shipped_text(path: str) -> str:
    """The text of a file that comes with cetane, by its path in the package. It is UTF-8 whatever
    the user's locale is."""
    return (resources.files("cetane") / path).read_text(encoding="utf-8")


def documentation(page: str) -> str:
    """The path on this machine of a page of the documentation, such as `reference/models.md`."""
    folder = Path(str(resources.files("cetane"))) / "docs"
    if not folder.is_dir():  # a source checkout keeps it at the top
        folder = Path(__file__).parents[3] / "docs"
    return str(folder / page)


def refuse_pointer(path: Path) -> None:
    """Raise CetaneError for a pointer of Git LFS: the few lines of a file that was not downloaded.

    Source: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
    """
    with suppress(OSError), open_regular(path) as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise CetaneError(
                f"{path} is a pointer of Git LFS: the file itself was not downloaded",
                f"run in {path.parent}: git lfs pull",
            )


def read_json(path: Path, follow: bool = True, unique: bool = False) -> dict[str, Any]:
    """The JSON object in `path`. Raises CetaneError if it cannot be read or is not an object; with
    `unique`, also for an object that has a key twice."""
    value = parse_json(read_bytes(path, follow=follow), str(path), unique=unique)
    if not isinstance(value, dict):
        raise CetaneError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def is_present(path: Path) -> bool:
    """Whether anything has this name. A pipe or a broken link is no missing file: reading it
    fails."""
    return os.path.lexists(path)


def read_json_if_present(path: Path) -> dict[str, Any]:
    """As `read_json`, but empty if nothing has this name."""
    return read_json(path) if is_present(path) else {}


def read_named(kind: type[Content], path: Path, most: int, key: str, hint: str) -> Content:
    """Data of a kind from the JSON file that a recipe's `key` names, of at most `most` bytes.

    Raises CetaneError with the hint if the file holds none.
    """
    try:
        content = read_bytes(path, most)
    except CetaneError as error:
        raise CetaneError(f"{key}: {error.message}", hint) from error
    return validated(kind, parse_json(content, str(path), hint), str(path), hint)


def read_toml(path: Path) -> dict[str, Any]:
    """The TOML table in `path`. Raises CetaneError if it cannot be read or is not TOML."""
    text = read_text(path, LARGEST_TOML).removeprefix("\ufeff")  # some editors begin a file so
    return parse_toml(text, str(path))


def read_exactly(path: Path, offset: int, nbytes: int) -> bytearray:
    """`nbytes` bytes of `path` from `offset`, in memory of their own.

    The caller must check the range against the file's size. Raises CetaneError if the file has
    become shorter since, or cannot be read.
    """
    buffer = bytearray(nbytes)
    try:
        with open_regular(path) as file:
            file.seek(offset)
            count = file.readinto(buffer)
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error.strerror}") from error
    if count != nbytes:
        raise CetaneError(f"{path} became shorter while it was open", "download or copy it again")
    return buffer


def regular_files(root: Path) -> list[str]:
    """The paths, from `root`, of the files under it, sorted.

    Raises CetaneError unless all entries are regular files or folders: a link leads elsewhere, and
    a pipe blocks its reader.
    """
    names, folders = [], [root]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            raise CetaneError(f"cannot read {folder}: {error.strerror}") from error
        for entry in entries:
            path = folder / entry.name
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif entry.is_file(follow_symlinks=False):
                names.append(path.relative_to(root).as_posix())
            else:
                kind = "a link" if entry.is_symlink() else "neither a file nor a folder"
                raise CetaneError(f"{root}: {path.relative_to(root)} is {kind}")
    return sorted(names)


def leads_elsewhere(folder: Path) -> bool:
    """Whether a folder is a link, or holds anything but regular files and folders."""
    if not folder.is_symlink():
        with suppress(CetaneError):
            regular_files(folder)
            return False
    return True


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files of a folder. Does not follow links."""
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.lstat().st_size for file in files if not file.is_dir())
