"""What tells one file from another, for fingerprints and for keys."""

from pathlib import Path

from cetane.errors import CetaneError
from cetane.files.cache import read_cache, write_cache
from cetane.files.hashes import json_sha256, sha256
from cetane.files.paths import cache_dir


def file_identity(path: Path) -> str:
    """The name, size in bytes and modification time in nanoseconds of `path`, for fingerprints."""
    try:
        status = path.stat()
    except OSError as error:
        raise CetaneError(f"cannot read {path}: {error.strerror}") from error
    return f"{path.name} {status.st_size} {status.st_mtime_ns}\n"


def content_identity(path: Path) -> str:
    """The name and the SHA-256 of `path`, for keys that machines share. The hash is kept in the
    cache folder as long as the file is the same."""
    identity, status = file_identity(path), path.stat()
    # who writes over a file may keep its size, date and inode, but no tool sets ctime back
    same = f"{identity}{status.st_ino} {status.st_ctime_ns}"
    known = cache_dir() / "hashes" / json_sha256([str(path.resolve()), same])
    digest = read_cache(known)
    if digest is None:
        digest = sha256(path)
        write_cache(known, digest)
    return f"{path.name} {digest}\n"
