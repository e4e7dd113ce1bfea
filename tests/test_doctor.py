"""What the doctor sees and what gc takes, on a machine that is made for the test."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cetane import doctor as upkeep
from cetane.doctor import Diagnosis, clean, diagnose, leftovers
from cetane.errors import CetaneError
from cetane.files import claimed, remove
from cetane.pipeline.partial import Partial

Make = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """An empty machine: `make(path, bytes, days)` puts a folder with a file on it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("cetane.doctor.Path.home", lambda: tmp_path)

    def make(path: str, size: int = 10, days: float = 0) -> Path:
        folder = tmp_path / path
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(bytes(size))
        then = time.time() - days * upkeep.DAY
        os.utime(folder, (then, then))
        return folder

    return make


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.doctor.os_build", lambda: "25B78")
    monkeypatch.setattr("cetane.doctor.is_mac", lambda: True)


def stopped(target: Path, days: float) -> Partial:
    """A build that was stopped some days ago."""
    partial = Partial(target)
    partial.start("key")
    then = time.time() - days * upkeep.DAY
    for path in (partial.key, partial.done, partial.bundle / "shards", partial.bundle):
        os.utime(path, (then, then))
    return partial


@pytest.mark.parametrize(("place", "name"), [("", "disk here"), ("cache", "cache")])
def test_a_folder_that_cannot_be_written(
    place: str, name: str, machine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("cache")
    monkeypatch.chdir(tmp_path)
    closed = tmp_path / place
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and allowed(path, mode))
    found = named(diagnose(), name)
    assert (found.state, found.value) == ("warning", f"you may not write to {closed}")


def named(checks: list[Diagnosis], name: str) -> Diagnosis:
    (found,) = [check for check in checks if check.name == name]
    return found


def test_this_machine_is_fit(machine: Make) -> None:
    checks = diagnose()
    assert not [check for check in checks if check.state == "failure"]
    assert named(checks, "coremltools").value == "9.0"
    assert named(checks, "coremltools libmilstoragepython").state == "ok"
    assert named(checks, "leftovers").state == "ok"


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another version a warning, of a missing package a failure; extras are not asked for."""
    lines = ["coremltools==8.3", "no-such-package>=1", "numpy>=1", "nothing; extra == 'dev'"]
    monkeypatch.setattr("cetane.doctor.requires", lambda _: lines)
    python, old, missing, numpy = upkeep.versions()
    assert python.state == numpy.state == "ok"
    assert (old.state, missing.state) == ("warning", "failure")
    assert "made for ==8.3" in old.hint
    assert "pip install 'no-such-package>=1'" in missing.hint


def test_a_wheel_without_native_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.doctor.EXTENSION_SUFFIXES", [".cpython-399-darwin.so"])
    checks = list(upkeep.native_libraries())
    assert {check.state for check in checks} == {"failure"}
    assert "use Python 3.11 to 3.13" in checks[0].hint


@pytest.mark.usefixtures("mac")
def test_a_mac_needs_one_more_native_part() -> None:
    assert named(list(upkeep.native_libraries()), "coremltools libcoremlpython")


def test_little_space(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "LOW_SPACE", 1 << 62)
    found = named(list(upkeep.space()), "temporary space")
    assert found.state == "warning"
    assert "TMPDIR" in found.hint


def test_temporary_files(machine: Make, tmp_path: Path) -> None:
    """Old packages go; fresh ones, other files and what links point at stay."""
    old = machine("tmp/tmpab12cd3_.mlpackage", 1000, days=2)
    machine("tmp/tmpcd34ef56.mlpackage")
    for name in ("else", "else.mlmodelc", "0-1.mlmodelc"):
        machine(f"tmp/somebody-{name}", days=9)
    machine("tmp/tmp-model.mlpackage", days=9)
    machine("elsewhere.mlpackage", days=9)
    (tmp_path / "tmp/tmplinklink.mlpackage").symlink_to(tmp_path / "elsewhere.mlpackage")
    (found,) = leftovers()
    assert (found.path, found.bytes) == (old, 1000)
    assert named(diagnose(), "leftovers").state == "warning"
    clean([found])
    assert not old.exists()
    assert (tmp_path / "elsewhere.mlpackage/file").is_file()
    assert leftovers() == []


def test_without_a_folder_for_temporary_files(
    machine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container whose root is read-only. The other checks go on."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    found = named(diagnose(), "temporary space")
    assert found.state == "failure" and "TMPDIR" in found.hint
    assert named(diagnose(), "cache").state in ("ok", "warning")


@pytest.mark.usefixtures("mac")
def test_after_an_upgrade(machine: Make) -> None:
    """Caches and programs of another build of the system go, those of this one stay."""
    cache = "Library/Caches/zaya_ane_runtime/com.apple.e5rt.e5bundlecache"
    stale = machine(f"{cache}/24G84", 5000)
    kept = machine(f"{cache}/25B78")
    other = machine("Library/Caches/com.apple.python3/com.apple.e5rt.e5bundlecache/24F74")
    machine("Library/Caches/another-app/settings")
    compiled = machine("cache/compiled/0123-chunk-00-24G84.mlmodelc")
    machine("cache/compiled/0123-chunk-00-25B78.mlmodelc")
    found = leftovers()
    assert {item.path for item in found} == {stale, other, compiled}
    assert next(item.bytes for item in found if item.path == stale) == 5000
    clean(found)
    assert kept.is_dir()
    assert leftovers() == []


def test_another_system_has_no_ane_caches(machine: Make) -> None:
    machine("Library/Caches/app/com.apple.e5rt.e5bundlecache/24G84")
    machine("cache/compiled/0123-chunk-00-24G84.mlmodelc")
    assert leftovers() == []
    assert named(diagnose(), "ANE caches").value == "none: this is not a Mac"


def test_everything_that_a_killed_process_leaves(
    machine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds, half-written cache files and prepared graphs; fresh ones and a stranger's stay."""
    monkeypatch.chdir(tmp_path)
    old = [
        stopped(tmp_path / "bundle", days=2).root,
        machine("cache/prepared/abc", days=40),
    ]
    stopped(tmp_path / "new", days=0)
    for kept in ("earlier", "heads", "thesis"):  # they may hold draft heads that took long to train
        (stopped(tmp_path / f"has-{kept}", days=2).root / kept).mkdir()
    machine("download.partial/bundle", days=9)
    machine("cache/prepared/def", days=3)
    half, theirs = tmp_path / "cache/tokenizers/.tmp1234", tmp_path / "cache/work/.settings"
    for path in (half, theirs):
        path.parent.mkdir()
        path.write_bytes(b"x")
        os.utime(path, (0, 0))
    assert {item.path for item in leftovers()} == {*old, half}
    clean(leftovers())
    assert not leftovers() and (tmp_path / "download.partial").is_dir() and theirs.is_file()


def test_what_a_killed_writer_left_beside_its_target(
    machine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fresh ones, those of a running writer, links and other names stay."""
    monkeypatch.chdir(tmp_path)
    old = machine(".app.v2.4711.tmp", 1000, days=2)
    machine(".app.4712.tmp")
    for name in (".notes.tmp", ".app.mine.tmp", "app.4711.tmp", "elsewhere/.app.4711.tmp"):
        machine(name, days=9)
    (tmp_path / ".linked.4711.tmp").symlink_to(tmp_path / "elsewhere")
    (found,) = leftovers()
    assert (found.path, found.bytes, found.why) == (old, 1000, "a half-written app.v2")
    with (tmp_path / ".app.v2.lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert leftovers() == []
    clean([found])
    assert not old.exists() and leftovers() == []


def test_a_build_that_goes_on_stays(
    machine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped long ago, it runs again, or did lately."""
    monkeypatch.chdir(tmp_path)
    running = stopped(tmp_path / "running", days=2)
    resumed = stopped(tmp_path / "resumed", days=2)
    (resumed.bundle / "embedding.npy").write_bytes(b"x")
    os.utime(resumed.bundle, (0, 0))
    resumed.record("embedding.npy")
    with claimed(tmp_path / "running", "building"):
        assert leftovers() == []
    assert [item.path for item in leftovers()] == [running.root]


def test_what_others_own_stays(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tmpab12cd3_.mlpackage", "cetane-kit-abc", "cetane-kept-abc"):
        machine(f"tmp/{name}", days=2)
    machine("tmp/cetane-notes", days=9)
    assert len(leftovers()) == 3
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
    assert leftovers() == []


def test_one_that_stays_keeps_no_other(machine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [machine(f"tmp/tmp0000000{number}.mlpackage", days=2) for number in range(4)]

    def refusing(path: Path) -> None:
        if path in items[:2]:
            raise PermissionError(13, "Permission denied")
        remove(path)

    monkeypatch.setattr("cetane.doctor.remove", refusing)
    with pytest.raises(CetaneError, match=r"cannot remove .*tmp00000000.* denied, nor 1 others"):
        clean(leftovers())
    assert [path.exists() for path in items] == [True, True, False, False]
