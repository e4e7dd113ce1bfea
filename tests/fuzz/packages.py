"""The fuzzer of Core ML packages: small good ones, damaged, and everything that reads programs."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from functools import cached_property

from tests.fuzz.fuzzer import Files, Fuzzer
from tests.fuzz.specifications import damaged_specification, scribbled

from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.fast.compiled import compile_loop
from cetane.mil.inputs import random_inputs
from cetane.mil.program import Program

MANIFEST = """{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "a", "itemInfoEntries": {"a": {
"author": "x", "description": "x", "name": "m", "path": "com.apple.CoreML/model.mlmodel"}}}"""
SPECIFICATION = "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"


class Package(Fuzzer):
    @cached_property
    def seeds(self) -> list[Files]:  # type: ignore[override]
        from tests.fuzz.seed_packages import make_seeds

        compile_loop()  # 20 seconds on a fresh machine, which no input is to blame for
        folder = self.folder.parent / "seeds"
        folder.mkdir()
        return make_seeds(folder)

    def mutate(self, draw: random.Random) -> Files:
        files = dict(draw.choice(self.seeds))
        files[SPECIFICATION] = damaged_specification(files[SPECIFICATION], draw)
        if draw.random() < 0.1:
            files[WEIGHTS] = scribbled(files[WEIGHTS], draw)
        if draw.random() < 0.02:
            files["model.mlpackage/Manifest.json"] = scribbled(MANIFEST.encode(), draw)
        return files

    def check(self, files: Files) -> None:
        """AssertionError for a file outside the package and the folder of an export."""
        self.write(files)
        before = self.listing()
        program = load(self.folder / "model.mlpackage")
        for stage in (audited, run_exactly, run_fast, self.exported, compared):
            with suppress(CetaneError):
                stage(program)
        shutil.rmtree(self.folder / "onnx", ignore_errors=True)
        assert self.listing() == before, "a file outside the folder of the export"

    def listing(self) -> list[str]:
        parent = self.folder.parent
        return sorted(path.name for path in (*parent.iterdir(), *self.folder.iterdir()))

    def exported(self, program: Program) -> None:
        from cetane.mil.fast.onnx_files import export

        (self.folder / "onnx").mkdir(exist_ok=True)
        export(program, self.folder / "onnx", lambda *_: None)


def audited(program: Program) -> None:
    from cetane.gates.residency.audit import audit
    from cetane.gates.residency.target import Target

    audit({"model": program}, Target())


def run_exactly(program: Program) -> None:
    from cetane.mil.executor import Executable

    for function in program.functions.values():
        run = Executable(function, "fp16")
        run(random_inputs(function), run.make_state())


def run_fast(program: Program) -> None:
    from cetane.mil.fast import FastProgram

    for name, function in program.functions.items():
        run = FastProgram(program, pack=True).function(name)
        run(random_inputs(function), run.make_state())


def compared(program: Program) -> None:
    from cetane.mil.compare import Comparer
    from cetane.mil.executor import Executable

    for function in program.functions.values():
        run = Executable(function)
        Comparer(run, run)(random_inputs(function))
