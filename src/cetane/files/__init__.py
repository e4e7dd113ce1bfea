"""Files: atomic writes, bounded reads, hashes, listings, locks and the cache folder.

A file is written whole or not at all, and nothing in a file is trusted before it is checked.
"""

from pathlib import Path

from cetane.files.cache import (
    forget_oldest,
    is_kept,
    keep_tensors,
    keep_text,
    keeping,
    kept_tensors,
    read_cache,
    write_cache,
)
from cetane.files.hashes import (
    MOST_FILES,
    FileRecord,
    check_files,
    code_sha256,
    json_sha256,
    records,
    sha256,
)
from cetane.files.identities import content_identity, file_identity
from cetane.files.kernels import KERNELS, KERNELS_OF, place_kernels
from cetane.files.locks import claimed, is_claimed
from cetane.files.paths import (
    PARTIAL,
    cache_dir,
    check_outside,
    home,
    inside,
    is_file,
    nameable,
)
from cetane.files.progress import Progress, silent
from cetane.files.reading import (
    LARGEST,
    LARGEST_TEXT,
    documentation,
    is_present,
    leads_elsewhere,
    open_regular,
    open_to_append,
    read_bytes,
    read_exactly,
    read_json,
    read_json_if_present,
    read_named,
    read_text,
    read_toml,
    refuse_pointer,
    regular_files,
    shipped_text,
    size_of,
)
from cetane.files.writing import (
    READ_ONLY,
    check_space,
    check_writable,
    disk_errors,
    remove,
    replacing,
    target_of,
    write_json,
    write_text,
    write_toml,
)

__all__ = [
    "KERNELS",
    "KERNELS_OF",
    "LARGEST",
    "LARGEST_TEXT",
    "MOST_FILES",
    "PARTIAL",
    "READ_ONLY",
    "FileRecord",
    "Progress",
    "cache_dir",
    "check_files",
    "check_outside",
    "check_space",
    "check_writable",
    "claimed",
    "code_sha256",
    "content_identity",
    "disk_errors",
    "documentation",
    "file_identity",
    "forget_oldest",
    "home",
    "inside",
    "is_claimed",
    "is_file",
    "is_kept",
    "is_present",
    "json_sha256",
    "keep_tensors",
    "keep_text",
    "keeping",
    "kept_tensors",
    "leads_elsewhere",
    "nameable",
    "open_regular",
    "open_to_append",
    "read_bytes",
    "read_cache",
    "read_exactly",
    "read_json",
    "read_json_if_present",
    "read_named",
    "read_text",
    "read_toml",
    "records",
    "refuse_pointer",
    "regular_files",
    "remove",
    "replacing",
    "sha256",
    "shipped_text",
    "silent",
    "size_of",
    "target_of",
    "write_cache",
    "write_json",
    "write_text",
    "write_toml",
]

place_kernels(Path(__file__).parents[1])  # here: all modules with compiled functions need this one
