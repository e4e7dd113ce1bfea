"""`cetane diff` as a user sees it: what it names, its exit codes, and bad input of every kind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_model
from tests.mil.conftest import save_program

from cetane.bundle import Bundle
from cetane.hardware.quiet import import_coremltools

from .conftest import Cetane

import_coremltools()

from coremltools.converters.mil import Builder as mb  # noqa: E402

INPUTS = {"x": ((2, 4), "fp16")}


def scaled(scale: float, name: str = "doubled") -> Callable[..., Any]:
    def body(x: Any) -> Any:
        return mb.add(x=mb.mul(x=x, y=np.float16(scale), name=name), y=x, name="y")

    return body


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Programs `y = s x + x` that are right, wrong, or overflow, and one of another shape."""
    bodies: dict[str, Any] = {
        "right": scaled(2),
        "wrong": scaled(2.5),
        "renamed": scaled(2, "twice"),
        "hot": scaled(60000),
    }
    made = {
        name: save_program(tmp_path_factory.mktemp("package"), INPUTS, body)
        for name, body in bodies.items()
    }
    made["wide"] = save_program(
        tmp_path_factory.mktemp("package"), {"x": ((2, 5), "fp16")}, scaled(2)
    )
    return made


def test_two_packages_that_part(cetane: Cetane, packages: dict[str, Path]) -> None:
    result = cetane("diff", packages["right"], packages["wrong"])
    assert result.code == 1
    assert "first op that errs by itself (main)" in result.out
    assert "doubled (mul)" in result.out
    assert "parameter: y 2.5, was 2.0" in result.out
    assert "they differ (tolerance 0.001 for one op, 0.05 for all together)" in result.out
    found = cetane("diff", packages["right"], packages["wrong"], "--json").json
    assert not found["passed"]
    part = found["parts"]["main"]
    assert part["first_own"]["name"] == part["first_total"]["name"] == "doubled"
    assert part["first_own"]["own"]["relative"] == pytest.approx(0.25)
    assert part["first_own"]["causes"] == ["parameter: y 2.5, was 2.0"]
    assert [op["name"] for op in part["ops"]] == ["doubled", "y"]
    assert part["ops"][1]["own"]["relative"] == 0
    assert part["outputs"]["y"]["relative"] == pytest.approx(1 / 6, rel=1e-3)


def test_two_packages_that_agree(cetane: Cetane, packages: dict[str, Path]) -> None:
    result = cetane("diff", packages["right"], packages["renamed"])
    assert result.code == 0
    assert "they agree" in result.out
    found = cetane("diff", packages["right"], packages["renamed"], "--json").json
    assert found["passed"]
    ops = {op["name"]: op["counterpart"] for op in found["parts"]["main"]["ops"]}
    assert ops == {"twice": "doubled", "y": "y"}


def test_a_last_op_that_only_one_has(cetane: Cetane, tmp_path: Path) -> None:
    paths = []
    for scale in (None, 1.03):
        (tmp_path / str(scale)).mkdir()

        def body(x: Any, scale: float | None = scale) -> Any:
            if scale is None:
                return mb.tanh(x=x, name="y")
            return mb.mul(x=mb.tanh(x=x, name="inner"), y=np.float16(scale), name="y")

        paths.append(save_program(tmp_path / str(scale), INPUTS, body))
    shown = cetane("diff", *paths)
    assert shown.code == 1
    assert "main y: ops that only the second has change it by 0.03" in shown.out


def test_one_package_in_fp16(cetane: Cetane, packages: dict[str, Path]) -> None:
    result = cetane("diff", packages["hot"], "--precision", "fp16")
    assert result.code == 1
    assert "fp16: overflow" in result.out
    assert "largest values (fp16 ends at 65504)" in result.out
    assert cetane("diff", packages["right"], "--precision", "fp16").code == 0


def test_inputs_of_a_file(cetane: Cetane, packages: dict[str, Path], tmp_path: Path) -> None:
    file = tmp_path / "inputs.npz"
    np.savez(file, x=np.full((2, 4), 0.5, np.float32))
    result = cetane("diff", packages["hot"], "--precision", "fp16", "--inputs", file, "--json")
    assert result.json["passed"]
    assert result.json["parts"]["main"]["largest"][0]["largest"] == pytest.approx(30000, rel=1e-3)


def test_nan_on_both_sides_tells_nothing(
    cetane: Cetane, packages: dict[str, Path], tmp_path: Path
) -> None:
    file = tmp_path / "inputs.npz"
    x = np.ones((2, 4), np.float32)
    x[0] = np.nan
    np.savez(file, x=x)
    told = "main y: 50% of the first's values are NaN: they tell nothing"
    pair = ("diff", packages["right"], packages["renamed"], "--inputs", file)
    assert cetane(*pair, "--json").json["warnings"] == [told]
    assert f"warning: {told}" in " ".join(cetane(*pair).err.split())


def test_the_tolerance_and_the_length_of_lists(cetane: Cetane, packages: dict[str, Path]) -> None:
    pair = packages["right"], packages["wrong"]
    assert cetane("diff", *pair, "--tolerance", "0.3").code == 0
    found = cetane("diff", *pair, "--top", "1", "--json").json
    assert len(found["parts"]["main"]["ops"]) == 1


@pytest.mark.parametrize(
    ("second", "options", "message"),
    [
        ("wide", [], "input x is fp16 (2, 4) in the first program, fp16 (2, 5) in the second"),
        (None, [], "nothing to compare"),
        ("wrong", ["--function", "prefill"], "no function 'prefill'; it has main"),
        (None, ["--model", "nothing"], "is not a bundle"),
        ("nothing", [], "does not exist"),
        ("wrong", ["--inputs", "nothing.npz"], "not a readable .npz"),
    ],
)
def test_what_cannot_be_compared(
    cetane: Cetane, packages: dict[str, Path], second: str | None, options: list[str], message: str
) -> None:
    others = [] if second is None else [packages.get(second, Path(second))]
    result = cetane("diff", packages["right"], *others, *options)
    assert message in result.error
    assert result.out == ""


@pytest.mark.parametrize("options", [["--precision", "fp8"], ["--top", "0"], ["--tolerance", "-1"]])
def test_options_out_of_range(
    cetane: Cetane, packages: dict[str, Path], options: list[str]
) -> None:
    assert cetane("diff", packages["right"], *options).code == 2


def test_a_bundle(cetane: Cetane, ported: Bundle, tiny_checkpoint_folder: Path) -> None:
    found = cetane("diff", ported.path, "--precision", "fp16", "--json").json
    assert found["passed"]
    assert list(found["parts"]) == ["model/prefill"]
    assert found["tables"]["embedding"]["relative"] == 0
    result = cetane("diff", ported.path, "--model", tiny_checkpoint_folder, "--function", "decode")
    assert result.code == 0
    assert "shards, fed with the model's tensors" in result.out
    assert "they agree" in result.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--function", "main", "--precision", "fp16"], "no mode 'main'; it has decode, prefill"),
        (["--precision", "fp16", "--inputs", "x.npz"], "--inputs is for packages"),
        (["--model", "nothing", "--precision", "fp16"], "--model compares one bundle"),
        (["--model", "nothing"], "no such file or folder: nothing"),
    ],
)
def test_what_a_bundle_does_not_take(
    cetane: Cetane, ported: Bundle, options: list[str], message: str
) -> None:
    assert message in cetane("diff", ported.path, *options).error


def test_a_damaged_bundle(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    copy = shutil.copytree(ported.path, tmp_path / "bundle")
    (copy / "embedding.npy").write_bytes(b"")
    assert "is not the file that was built" in cetane("diff", ported.path, copy).error


def test_a_package_and_a_bundle(cetane: Cetane, ported: Bundle, packages: dict[str, Path]) -> None:
    assert "not a Core ML package" in cetane("diff", packages["right"], ported.path).error
    assert "no manifest.json" in cetane("diff", ported.path, packages["right"]).error


@pytest.mark.parametrize("command", ["diff", "validate"])
@pytest.mark.parametrize(("kind", "what"), [("qwen2", "architecture"), ("llama", "layers")])
def test_a_model_of_another_shape(
    cetane: Cetane, gated: Bundle, tiny_checkpoint_folder: Path, tmp_path: Path, command: str,
    kind: str, what: str,
) -> None:  # fmt: skip
    """Nothing can be compared, and the error says so."""
    shutil.copytree(tiny_checkpoint_folder, tmp_path / "other")
    build_model(kind, num_hidden_layers=3).save_pretrained(tmp_path / "other")
    result = cetane(command, gated.path, "--model", tmp_path / "other")
    assert result.code == 2
    assert f"is another model than {gated.path} was built from: its {what}" in result.error
