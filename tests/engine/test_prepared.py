"""Prepared models: the same results as from the package, whatever has become of the files."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.mil.conftest import mb, save_program

from cetane import doctor
from cetane.engine.prepared import PreparedProgram, trim
from cetane.mil import load
from cetane.mil.fast import FastProgram
from cetane.mil.fast.tape.loop import compile_, perform

WEIGHT = np.random.default_rng(0).standard_normal((16, 16, 1, 1)).astype(np.float16)
X = np.random.default_rng(1).standard_normal((1, 16, 1, 3)).astype(np.float32)


MODELS = {
    "tape": lambda x: mb.conv(x=x, weight=WEIGHT),
    "graph": lambda x: mb.sin(x=mb.conv(x=x, weight=WEIGHT)),  # no tape has it
}
CODE = {"tape": "tapes.bin", "graph": "0.onnx"}


@pytest.fixture(scope="module", params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def package(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    return save_program(folder, {"x": ((1, 16, 1, 3), "fp16")}, MODELS[kind])


def result(package: Path) -> np.ndarray:
    (y,) = PreparedProgram(package).function("main")({"x": X}).values()
    return y


def test_it_is_kept_and_gives_what_the_package_gives(
    kind: str, package: Path, own_cache: Path
) -> None:
    (truth,) = FastProgram(load(package), pack=True).function("main")({"x": X}).values()
    assert not PreparedProgram(package).known
    for _ in range(2):
        np.testing.assert_array_equal(result(package), truth)
        assert PreparedProgram(package).known
    assert len(list(own_cache.rglob(CODE[kind]))) == 1


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def scribble(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0xFF
    file.write_bytes(content)


def of_another_size(file: Path) -> None:
    """Valid JSON: the sizes of tapes, or else of values, are one too large."""
    index = json.loads(file.read_text())
    for tape in index.get("tapes", {}).values():
        tape[1] += 1
    file.write_text(json.dumps(index).replace("16", "17"))


def deep(file: Path) -> None:
    file.write_text("[" * 100_000)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("code", scribble), ("code", Path.unlink), ("weights.bin", cut),
        ("weights.bin", scribble), ("weights.bin", Path.unlink), ("index.json", cut),
        ("index.json", Path.unlink), ("index.json", of_another_size), ("index.json", deep),
        ("index.json.sha256", scribble), ("index.json.sha256", Path.unlink),
    ],
)  # fmt: skip
def test_damaged_files_are_made_again(
    kind: str, package: Path, own_cache: Path, name: str, damage: Callable[[Path], None]
) -> None:
    truth = result(package)
    name = CODE[kind] if name == "code" else name
    (file,) = own_cache.rglob(name)
    whole = file.read_bytes()
    damage(file)
    np.testing.assert_array_equal(result(package), truth)
    again = next(own_cache.rglob(name)).read_bytes()
    if name == "index.json":  # it says when the weights were written
        assert json.loads(again)["functions"] == json.loads(whole)["functions"]
    elif name == "index.json.sha256":
        assert len(again) == len(whole)
    else:
        assert again == whole


def test_a_changed_package_is_another_one(
    kind: str, package: Path, own_cache: Path, tmp_path: Path
) -> None:
    result(package)
    (tmp_path / "other").mkdir()
    other = save_program(
        tmp_path / "other", {"x": ((1, 16, 1, 3), "fp16")},
        lambda x: MODELS[kind](mb.mul(x=x, y=np.float16(-1))),
    )  # fmt: skip
    np.testing.assert_allclose(result(other), -result(package), rtol=1e-5, atol=1e-6)


def test_where_nothing_can_be_written_it_runs_from_memory(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "file"))
    assert result(package).shape == X.shape


def test_the_one_used_longest_ago_goes_first(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        folder = tmp_path / name / "main"
        folder.mkdir(parents=True)
        (folder / "weights.bin").write_bytes(bytes(100))
        os.utime(folder, (1000 - age, 1000 - age))
    trim(tmp_path, largest=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]


def test_what_runs_every_day_is_no_leftover(package: Path, own_cache: Path) -> None:
    result(package)
    for path in [*own_cache.glob("prepared/*"), *own_cache.glob("prepared/*/*")]:
        os.utime(path, (0, 0))
    assert len(list(doctor.unused_cache_files())) == 1
    result(package)
    assert list(doctor.unused_cache_files()) == []


def test_neither_torch_nor_a_second_time_onnx_and_numba_are_imported(
    package: Path, own_cache: Path
) -> None:
    code = (
        "import sys; from pathlib import Path; from cetane.engine.prepared import PreparedProgram\n"
        f"PreparedProgram(Path({str(package)!r})).function('main')\n"
        "print(*(m for m in ('torch', 'coremltools', 'onnx', 'numba') if m in sys.modules))"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in outputs] == ["onnx numba", ""]


def test_a_kept_tape_runs_on_the_loop_that_was_compiled(
    kind: str, package: Path, own_cache: Path
) -> None:
    """numba compiles anew for every kind of array, which takes 20 seconds."""
    if kind != "tape":
        pytest.skip("graphs have no loop")
    compile_()
    for _ in range(2):
        result(package)
    FastProgram(load(package), pack=True).function("main")({"x": X})
    assert len(perform.signatures) == 1
