"""What all fuzzers are: a format that makes damaged inputs and reads them as commands do."""

import json
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import tomli_w
from tests.fuzz.values import DEEP, damaged, torn

Files = dict[str, bytes]
"""An input: contents of files by their paths in a folder."""


def dumped(content: Any) -> bytes:
    """JSON with NaN, lone surrogates, and lists that are 100,000 deep."""
    deep = "[" * 100_000 + "]" * 100_000
    return json.dumps(content).replace(json.dumps(DEEP), deep).encode("utf-8", "surrogatepass")


def contents(folder: Path) -> Files:
    """All files of a folder, by their paths in it."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class Fuzzer(ABC):
    """One format.

    `mutate` makes a damaged input, the same one for the same random numbers. `check` reads an
    input: it returns for what is read and raises `CetaneError` for what is refused. Anything else
    is a finding.
    """

    def __init__(self) -> None:
        shared = Path("/dev/shm")
        self._folder = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        self.folder = Path(self._folder.name) / "inner"
        self.folder.mkdir()

    @property
    @abstractmethod
    def seeds(self) -> list[Files]:
        """Inputs that are read."""

    @abstractmethod
    def mutate(self, random: Random) -> Files: ...

    @abstractmethod
    def check(self, files: Files) -> None: ...

    def write(self, files: Files) -> None:
        for name, data in files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


class Document(Fuzzer):
    """One file of JSON, of JSON lines or of TOML, and the function that reads it."""

    def __init__(self, name: str, contents: list[Any], read: Callable[[Path], object]) -> None:
        """`contents` are good ones; for JSON lines, a list of objects each."""
        super().__init__()
        self.name, self.contents, self.read = name, contents, read

    @property
    def seeds(self) -> list[Files]:
        return [{self.name: self.written(content)} for content in self.contents]

    def written(self, content: Any) -> bytes:
        if self.name.endswith(".jsonl"):
            return b"".join(dumped(line) + b"\n" for line in content)
        return tomli_w.dumps(content).encode() if self.name.endswith(".toml") else dumped(content)

    def mutate(self, random: Random) -> Files:
        content = random.choice(self.contents)
        if random.random() < 0.25:
            return {self.name: torn(random, self.written(content))}
        try:
            return {self.name: self.written(damaged(random, content, times=3))}
        except (TypeError, ValueError, AttributeError, RecursionError):  # what TOML cannot say
            return {self.name: random.choice(ODD_TOML).encode()}

    def check(self, files: Files) -> None:
        self.write(files)
        self.read(self.folder / self.name)


ODD_TOML = (
    "a.b.c = 1", ".".join("a" * 70) + " = 1", ".".join(["a"] * 20_000) + " = 1",
    "x = " + "[" * 5000 + "]" * 5000, "[" + ".".join(["a"] * 70) + "]", "x = " + "9" * 5000,
    "x = nan", "x = 1e999", "x = 9999-99-99", "x = '\x00'", "[[x]]\n[x]", "x = 1\nx = 2",
)  # fmt: skip
"""What JSON-like damage does not make."""
