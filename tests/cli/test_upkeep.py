"""cetane doctor, gc and recompile, as a user runs them."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from cetane.bundle import Bundle

from .conftest import Cetane


@pytest.fixture
def leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that a conversion left in the temporary folder long ago."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "tmpab12cd34.mlpackage"
    path.write_bytes(bytes(2_000_000))
    os.utime(path, (0, 0))
    return path


def test_doctor(cetane: Cetane, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cetane("doctor", "--json")
    assert found.code == 0
    assert {"python", "coremltools", "disk here"} <= {check["name"] for check in found.json}
    monkeypatch.setattr("cetane.doctor.requires", lambda _: ["no-such-package"])
    missing = cetane("doctor")
    assert missing.code == 1
    assert "no-such-package" in missing.out


def test_gc_is_a_dry_run_first(cetane: Cetane, leftover: Path) -> None:
    listed = cetane("gc")
    assert listed.code == 0
    assert "2.0 MB can go: cetane gc --remove" in listed.out
    assert leftover.exists()
    assert cetane("gc", "--json").json["leftovers"][0]["path"] == str(leftover)
    removed = cetane("gc", "--remove", "--json").json
    assert removed["removed"] is True
    assert not leftover.exists()
    assert cetane("gc").out == "nothing to remove\n"


def test_recompile_needs_a_mac(cetane: Cetane, ported: Bundle) -> None:
    assert "needs macOS 15" in cetane("recompile", ported.path).error
    assert "no such bundle" in cetane("recompile", "nothing").error
