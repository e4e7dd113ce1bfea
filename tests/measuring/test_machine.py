"""Whether a machine can measure."""

import platform
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.measuring.machine import check, facts
from cetane.measuring.record import Halt


def test_facts_of_this_machine() -> None:
    said = facts()
    assert said["mac"] == (platform.system() == "Darwin")
    assert said["coremltools"] == "9.0" and not said["virtual"]


def test_a_full_disk_is_told_in_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2 * 10**9))
    check(facts(), 10**9, tmp_path)
    with pytest.raises(Halt, match=r"2.0 GB are free in .*, and 3.0 GB are needed"):
        check(facts(), 3 * 10**9, tmp_path)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [({"coremltools": "not installed"}, "uv run"), ({"mac": True}, "needs? macOS 15|too old")],
)
def test_what_is_missing(
    machine: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "mac_ver", lambda: ("14.6", "", ""))
    with pytest.raises(Halt, match=reason):
        check(facts() | {"system": "macOS 14.6"} | machine, 0, tmp_path)


def test_an_intel_mac_has_no_neural_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.6", "", ""))
    for architecture, fits in (("arm64", True), ("x86_64", False)):
        monkeypatch.setattr(platform, "machine", lambda one=architecture: one)
        with nullcontext() if fits else pytest.raises(Halt, match="Apple silicon"):
            check(facts() | {"mac": True}, 0, tmp_path)


def test_memory_is_that_of_the_process_alone() -> None:
    """Not that of a larger one that started it."""
    large = b"x" * (1 << 29)
    command = "from cetane.measuring.machine import peak_bytes; print(peak_bytes())"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, check=True)
    assert 1 << 20 < int(done.stdout) < len(large) / 2
