"""The command line in this process, and what it works on."""

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.converting import converted_once

from cetane.bundle import Bundle
from cetane.cli import main
from cetane.pipeline import bench, language_model, versus

RECIPE = """
description = "The tiny model's."
[layout]
kind = "single"
[cache]
context = 64
[tokens]
prefill = 8
{verify}
"""


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command owns its process, a test does not."""
    for module in (bench, language_model, versus):
        monkeypatch.setattr(module, "share_threads", lambda: None)


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one JSON document on standard output."""
        assert self.code in (0, 1), self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line that says what is wrong, of a command that ended with 2."""
        assert self.code == 2
        assert "Traceback" not in self.err
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line.removeprefix("error: ")


Cetane = Callable[..., Result]


@pytest.fixture
def cetane(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cetane:
    """`cetane("run", bundle, ..., stdin="")`: run a command."""

    def run(*arguments: object, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "argv", ["cetane", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # `main` sets its own
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Result(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """A recipe that fits the tiny model."""
    file = tmp_path / "tiny.toml"
    file.write_text(RECIPE.format(verify="verify = 3"))
    return file


SMALL = """
[layout]
kind = "per-block"
[cache]
context = 32
[tokens]
verify = 0
prefill = 0
"""


@pytest.fixture
def small_file(tmp_path: Path) -> Iterator[Path]:
    """The recipe of the smallest build of several shards, which takes no time to convert."""
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    with converted_once():
        yield file


@pytest.fixture
def ported(tiny_bundle: Callable[..., Bundle]) -> Iterator[Bundle]:
    """A finished bundle of the tiny folder. Tests share it, so a test that changes it fails."""
    bundle = tiny_bundle(contract="stateful", layout={"kind": "single"}, tensor_layout="ct1",
                         head={"slices": 2})  # fmt: skip
    before = bundle.gates()
    yield bundle
    assert bundle.gates() == before, "take `gated`"


@pytest.fixture
def gated(ported: Bundle, tmp_path: Path) -> Bundle:
    """A copy whose gates may be written."""
    return Bundle(shutil.copytree(ported.path, tmp_path / "gated"))
