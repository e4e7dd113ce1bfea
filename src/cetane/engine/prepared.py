"""Prepared programs: models of packages, kept in the cache folder between runs."""

from __future__ import annotations

import os
import platform
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime

import cetane.mil
from cetane.errors import CetaneError
from cetane.files import cache_dir, code_sha256, forget_oldest, json_sha256, remove, sha256
from cetane.mil import load
from cetane.mil.fast.functions import FastFunction
from cetane.mil.fast.prepared import PreparedModel, holds, write

if TYPE_CHECKING:
    from cetane.mil.fast.program import FastProgram, SharedModel
    from cetane.mil.fast.tape.model import TapeModel

LARGEST = 8 << 30
"""Bytes of all prepared models. The least recently used model is removed first."""


class PreparedProgram:
    """A package whose functions are prepared on first use, and kept.

    A prepared model lies under the hash of everything that it depends on: the package, the code
    that translates it, onnxruntime, the processor, and whether weights stay packed. It is written
    under a temporary name, then renamed. A damaged model is prepared again. If nothing can be
    written, the function runs from memory.
    """

    def __init__(self, package: Path) -> None:
        self._package = package
        self._folder = cache_dir() / "prepared" / _key(package)
        self._models: list[PreparedModel] = []
        self._fast: FastProgram | None = None

    @property
    def known(self) -> bool:
        """Whether a function of the package is already prepared."""
        return any(self._folder.glob("*/index.json"))

    @property
    def fast(self) -> FastProgram:
        """The program that reads the package, for functions that are not prepared yet."""
        if self._fast is None:
            from cetane.mil.fast.program import FastProgram  # onnx takes a while to import

            self._fast = FastProgram(load(self._package), pack=True)
        return self._fast

    def function(self, name: str) -> FastFunction:
        """The function `name`. Raises as `FastProgram.function`."""
        for model in self._models:
            if name in model.functions:
                return model.functions[name]
        prepared = self._read(name)
        if prepared is None and self._write(name, self.fast.shared(name)):
            prepared = self._read(name)
        if prepared is None:
            return self.fast.function(name)
        self._models.append(prepared)
        return prepared.functions[name]

    def _read(self, name: str) -> PreparedModel | None:
        for folder in sorted(self._folder.glob("[!.]*")):
            if holds(folder, name):
                try:
                    prepared = PreparedModel.read(folder)
                except CetaneError:
                    _removed(folder)
                    continue
                # `trim` goes by the time of `folder`, the doctor by that of `self._folder`.
                for used in (folder, self._folder):
                    with suppress(OSError):
                        os.utime(used)
                return prepared
        return None

    def _write(self, name: str, shared: SharedModel | TapeModel) -> bool:
        """Write the model of a function. False if the cache folder is read-only."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(dir=self._folder, prefix="."))
        except OSError:
            return False
        try:
            write(shared, temporary)
            target = self._folder / name
            remove(target)
            os.replace(temporary, target)
        except OSError:
            _removed(temporary)
            return False
        except BaseException:
            _removed(temporary)
            raise
        trim(self._folder.parent, keep=target)
        return True


def trim(folder: Path, keep: Path | None = None, largest: int = LARGEST) -> None:
    """Remove the least recently used models until the rest has at most `largest` bytes."""
    forget_oldest((path for path in folder.glob("*/*") if path.is_dir()), largest, keep)
    for path in folder.iterdir():
        with suppress(OSError):
            path.rmdir()  # if it is empty


def _removed(path: Path) -> None:
    with suppress(OSError):
        remove(path)


def _key(package: Path) -> str:
    """The hash of everything that a prepared model depends on."""
    files = {
        path.relative_to(package).as_posix(): sha256(path)
        for path in sorted(package.rglob("*"))
        if path.is_file()
    }
    code = code_sha256(Path(cetane.mil.__file__).parent)  # that translates programs
    return json_sha256([files, onnxruntime.__version__, platform.machine(), code, _cpu()])[:32]


@cache
def _cpu() -> str:
    """The processor's features, if the system tells: packed weights depend on them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
