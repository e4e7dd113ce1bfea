"""The sandbox: what its child process can import."""

from pathlib import Path

import pytest

from cetane.checkpoint.sandbox import Sandbox


def test_a_child_finds_the_libraries_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may lie in the user's own site-packages, or where PYTHONPATH says."""
    (tmp_path / "only_here.py").touch()
    sandbox = Sandbox("import only_here", 10, 1 << 30, 30, {})
    assert not sandbox.succeeds(b"")
    monkeypatch.syspath_prepend(tmp_path)
    assert sandbox.succeeds(b"")


def test_a_child_sees_where_libraries_lie_and_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    monkeypatch.setenv("HF_TOKEN", "secret")
    said = Sandbox("import os; print(dict(os.environ))", 10, 1 << 30, 30, {"ONE": "1"}).run()
    assert "'LD_LIBRARY_PATH': '/opt/lib'" in said.stdout.decode()
    assert "'ONE': '1'" in said.stdout.decode() and "secret" not in said.stdout.decode()
