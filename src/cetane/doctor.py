"""The doctor: checks a machine's packages, disk and caches, and lists leftovers to remove.

Only a Mac has ANE caches and compiled programs.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from cetane.errors import SET_TMPDIR, CetaneError
from cetane.files import PARTIAL, cache_dir, home, is_claimed, remove, size_of, target_of
from cetane.hardware.mac import os_build
from cetane.measuring.machine import is_mac

NATIVE = ("libmilstoragepython", "libmodelpackage")
NATIVE_ON_MAC = (*NATIVE, "libcoremlpython")
LOW_SPACE = 20_000_000_000
"""With fewer free bytes, a build of a large model may not fit: ZAYA1-8B takes 9 GB in int8."""
MADE_AGAIN = ("bundle", "done", "key.json", "store")
"""All that an unfinished build holds and can make again. It may also hold the bundle that was being
replaced, draft heads that earlier versions put aside, and a user's own files."""
E5_CACHE = "com.apple.e5rt.e5bundlecache"
"""The folder in which Core ML keeps its compiled ANE programs, for each application and system
build. After an upgrade, ane-book's experiment 35 found 86 GB there."""
DAY = 86_400
"""Seconds."""
TEMPORARY_FILES = (
    f"tmp{'[a-z0-9_]' * 8}.mlpackage", f"tmp{'[a-z0-9_]' * 8}.mlmodelc", "cetane-*.mlmodelc",
    "cetane-plan-*", "cetane-activations-*", "cetane-diff-*", "cetane-task-*", "cetane-kit-*",
    "cetane-kept-*", "cetane-tokenizer-*",
)  # fmt: skip
"""Patterns of the leftovers of killed conversions in the temporary folder. coremltools' own have
the names that Python makes up."""
OWN_FOLDERS = (
    "call-times", "compiled", "conversations", "evaluations", "fitted", "hashes", "prepared",
    "remote", "suffixes", "tokenizers",
)  # fmt: skip
"""Folders in the cache folder where only cetane writes: `$CETANE_CACHE` may be a home folder."""
UNUSED = 30 * DAY
"""Seconds after which unused prepared graphs and fitted constants can go."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of one check."""

    name: str
    state: Literal["ok", "warning", "failure"]
    value: str
    hint: str = ""
    """What to do; empty if the check is ok."""


@dataclass(frozen=True)
class Leftover:
    """A file or folder that can be removed: it is made again on demand, or is never needed."""

    path: Path
    bytes: int
    why: str


def diagnose() -> list[Diagnosis]:
    """All checks of this machine, for ports and runs."""
    return [*versions(), *native_libraries(), *space(), *leftover_state()]


def versions() -> Iterator[Diagnosis]:
    """The versions of Python and of needed packages, compared with those that cetane supports."""
    yield Diagnosis("python", "ok", ".".join(map(str, sys.version_info[:3])))
    for line in requires("cetane") or []:
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            installed = version(needed.name)
        except PackageNotFoundError:
            yield Diagnosis(needed.name, "failure", "missing", f"pip install '{needed}'")
            continue
        fits = needed.specifier.contains(installed, prereleases=True)
        hint = "" if fits else f"cetane is made for {needed.specifier}: pip install '{needed}'"
        yield Diagnosis(needed.name, "ok" if fits else "warning", installed, hint)


def native_libraries() -> Iterator[Diagnosis]:
    """coremltools' compiled parts. Wheels for some Pythons lack them; coremltools then fails when
    it writes weights (coremltools #2617, #2361)."""
    spec = importlib.util.find_spec("coremltools")
    places = spec.submodule_search_locations if spec else None
    folder = Path(places[0]) if places else None
    for name in NATIVE_ON_MAC if is_mac() else NATIVE:
        there = folder is not None and any(
            (folder / f"{name}{suffix}").is_file() for suffix in EXTENSION_SUFFIXES
        )
        hint = "" if there else (
            "this coremltools has no native parts for this Python or machine: use Python 3.11 to "
            "3.13, on Linux x86-64 or a Mac"
        )  # fmt: skip
        yield Diagnosis(f"coremltools {name}", "ok" if there else "failure",
                    "there" if there else "missing", hint)  # fmt: skip


def space() -> Iterator[Diagnosis]:
    """The free space for bundles, for conversions and for the cache."""
    places = {"disk here": Path.cwd(), "temporary space": temporary_folder(), "cache": cache_dir()}
    for name, place in places.items():
        if place is None:
            yield Diagnosis(name, "failure", "no folder can be written", SET_TMPDIR)
            continue
        existing = next(p for p in (place, *place.parents) if p.exists())
        if not os.access(existing, os.W_OK):
            hint = "set CETANE_CACHE to a folder of yours" if name == "cache" else "go to another"
            yield Diagnosis(name, "warning", f"you may not write to {existing}", hint)
            continue
        free = shutil.disk_usage(existing).free
        low = free < LOW_SPACE
        hint = "" if not low else (
            "set TMPDIR to a larger disk" if name == "temporary space" else "cetane gc shows what "
            "can go"
        )  # fmt: skip
        yield Diagnosis(
            name, "warning" if low else "ok", f"{free / 1e9:.1f} GB free, {place}", hint
        )


def temporary_folder() -> Path | None:
    """The folder for temporary files; None if there is none that can be written."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return None


def leftover_state() -> Iterator[Diagnosis]:
    """The leftovers of system upgrades and killed conversions."""
    items = leftovers()
    size = sum(item.bytes for item in items)
    state: Literal["ok", "warning"] = "warning" if items else "ok"
    hint = "cetane gc lists them, cetane gc --remove removes them" if items else ""
    yield Diagnosis("leftovers", state, f"{len(items)}, {size / 1e9:.1f} GB", hint)
    if not is_mac():
        yield Diagnosis("ANE caches", "ok", "none: this is not a Mac")


def leftovers() -> list[Leftover]:
    """All leftovers, which can be removed without loss."""
    return [
        *other_builds(), *ane_caches(), *temporary_files(), *unfinished_builds(),
        *half_written_here(), *unused_cache_files(), *half_written_in_cache(),
    ]  # fmt: skip


def other_builds() -> Iterator[Leftover]:
    """Programs compiled for another build of the system."""
    build = os_build()
    for path in sorted((cache_dir() / "compiled").glob("*.mlmodelc")):
        if build is not None and not path.stem.endswith(f"-{build}"):
            yield Leftover(path, size_of(path), "compiled for another build of macOS")


def ane_caches() -> Iterator[Leftover]:
    """ANE caches of all applications, for other builds of the system."""
    build = os_build()
    if build is None:
        return
    for cache in sorted((home() / "Library" / "Caches").glob(f"*/{E5_CACHE}")):
        for folder in sorted(p for p in cache.iterdir() if p.is_dir() and p.name != build):
            why = f"ANE cache of {cache.parent.name} for another build of macOS"
            yield Leftover(folder, size_of(folder), why)


def temporary_files() -> Iterator[Leftover]:
    """Packages of this user's conversions that ended more than a day ago."""
    folder = temporary_folder()
    if folder is None:
        return
    for path in sorted({path for pattern in TEMPORARY_FILES for path in folder.glob(pattern)}):
        if is_older(path, DAY) and path.lstat().st_uid == os.getuid():
            yield Leftover(path, size_of(path), "left by a conversion")


def unfinished_builds() -> Iterator[Leftover]:
    """Builds in the current folder that were stopped more than a day ago.

    They may hold leftovers of lowering (`.lower-*`) and of writing (`.NAME.PROCESS.tmp`). One that
    holds anything else that is not made again is no leftover.
    """
    for path in sorted(Path.cwd().glob(f"*{PARTIAL}")):
        written = [path / name for name in ("key.json", "done", "bundle", "bundle/shards")]
        if not all(part.exists() and is_older(part, DAY) for part in written):
            continue
        names = {inner.name for inner in path.iterdir() if not inner.name.startswith(".")}
        if not names <= set(MADE_AGAIN):
            continue
        if not is_claimed(path.with_suffix("")):
            why = "a build that was stopped; the same command would continue it"
            yield Leftover(path, size_of(path), why)


def half_written_here() -> Iterator[Leftover]:
    """Files and folders beside their targets in the current folder, half-written by processes that
    were killed more than a day ago."""
    for path in sorted(Path.cwd().glob(".*.tmp")):
        target = target_of(path)
        if target is None or not is_older(path, DAY) or path.lstat().st_uid != os.getuid():
            continue
        if not is_claimed(target):
            yield Leftover(path, size_of(path), f"a half-written {target.name}")


def unused_cache_files() -> Iterator[Leftover]:
    """Prepared graphs, fitted constants and compiled kernels of more than a month ago."""
    kinds = {
        "prepared": "prepared for a program that was not run lately",
        "fitted": "fitted to a model that was not ported lately",
        "kernels": "compiled for a version of cetane, a month ago",
    }
    for kind, why in kinds.items():
        for path in sorted((cache_dir() / kind).glob("*")):
            if is_older(path, UNUSED):
                yield Leftover(path, size_of(path), why)


def half_written_in_cache() -> Iterator[Leftover]:
    """Half-written cache files of killed processes."""
    for path in sorted(path for kind in OWN_FOLDERS for path in (cache_dir() / kind).rglob(".*")):
        if path.is_file() and is_older(path, DAY):
            yield Leftover(path, size_of(path), "a half-written file of the cache")


def is_older(path: Path, seconds: float) -> bool:
    """Whether a file was last written or read, or a folder written, more than `seconds` ago.

    False for a link.
    """
    status = path.lstat()
    used = max(status.st_mtime, status.st_atime if path.is_file() else 0)
    return not path.is_symlink() and time.time() - used > seconds


def clean(items: list[Leftover]) -> None:
    """Remove leftovers. Raises CetaneError at the end if some could not be removed."""
    left = []
    for item in items:
        try:
            remove(item.path)
        except OSError as error:
            left.append(f"{item.path}: {error.strerror}")
    if left:
        others = f", nor {len(left) - 1} others" if left[1:] else ""
        raise CetaneError(f"cannot remove {left[0]}{others}", "all other leftovers are removed")
