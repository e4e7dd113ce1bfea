"""Packages that are not what they should be are refused in one line that says why."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.libmodelpackage import ModelPackage
from coremltools.proto import Model_pb2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cetane.errors import CetaneError
from cetane.mil import held, load, reader
from cetane.mil.executor import Executable

SPEC = "Data/com.apple.CoreML/model.mlmodel"
WEIGHTS = "Data/com.apple.CoreML/weights/weight.bin"
TABLE = np.arange(12, dtype=np.float16)


@pytest.fixture(scope="module")
def good(build: Callable[..., Path]) -> Path:
    def body(x: Any) -> Any:
        pieces = mb.split(x=mb.add(x=x, y=TABLE), split_sizes=[4, 8], axis=0)
        return mb.concat(values=[mb.softmax(x=piece) for piece in pieces], axis=0)

    return build({"x": ((12,), "fp16")}, body)


@pytest.fixture
def package(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "copy.mlpackage"))


def edit_spec(package: Path, edit: Callable[[Any], None]) -> None:
    spec = Model_pb2.Model()
    spec.ParseFromString((package / SPEC).read_bytes())
    edit(spec)
    (package / SPEC).write_bytes(spec.SerializeToString())


def first(spec: Any, kind: str) -> Any:
    (function,) = spec.mlProgram.functions.values()
    (body,) = function.block_specializations.values()
    return next(op for op in body.operations if op.type == kind)


def weight(spec: Any) -> Any:
    (function,) = spec.mlProgram.functions.values()
    (body,) = function.block_specializations.values()
    values = (op.attributes["val"] for op in body.operations if op.type == "const")
    return next(v for v in values if v.WhichOneof("value") == "blobFileValue").blobFileValue


def refuses(package: Path, message: str) -> None:
    with pytest.raises(CetaneError, match=message) as error:
        Executable(load(package).functions["main"])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("default", "shapes", "message"),
    [
        ((12,), [(12,), (13,)], r"x may have the shape \(13,\), but is declared fp16 \(12\)"),
        ((13,), [(12,)], r"x has the default shape \(13,\)"),
    ],
)
def test_an_interface_with_shapes_that_the_program_lacks(
    package: Path, default: tuple[int], shapes: list[tuple[int]], message: str
) -> None:
    def edit(spec: Any) -> None:
        (feature,) = spec.description.input
        array = feature.type.multiArrayType
        array.shape[:] = default
        for shape in shapes:
            array.enumeratedShapes.shapes.add().shape[:] = shape

    edit_spec(package, edit)
    refuses(package, message)


def test_not_a_package(tmp_path: Path) -> None:
    refuses(tmp_path / "absent", "is not a Core ML package")
    (tmp_path / "file").write_text("")
    refuses(tmp_path / "file", "an .mlpackage is a folder")


VERSION = '{"fileFormatVersion": "1.0.0", "rootModelIdentifier": "a", "itemInfoEntries": '


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"itemInfoEntries": {}}', '{"a": 1, "a": 2}',
        VERSION + "[1]}", VERSION + '"x"}', VERSION + '{"a": null}}', VERSION + "{}}",
    ],
)  # fmt: skip
def test_broken_manifest(package: Path, text: str) -> None:
    (package / "Manifest.json").write_text(text)
    refuses(package, "is not a package manifest")


@pytest.mark.parametrize("place", ["../../elsewhere", "x" * 5000, "x\0"])
def test_manifest_that_points_outside(package: Path, place: str) -> None:
    """Or to a name that no file can have."""
    manifest = json.loads((package / "Manifest.json").read_text())
    manifest["itemInfoEntries"][manifest["rootModelIdentifier"]]["path"] = place
    (package / "Manifest.json").write_text(json.dumps(manifest))
    refuses(package, "the item .* is outside the package")


@pytest.mark.parametrize(
    "change",
    [
        {"fileFormatVersion": "9.9.9"},
        {"fileFormatVersion": None},
        {"author": None},
        {"name": None},
        {"description": None},
        {"path": "com.apple.CoreML/absent"},
    ],
)
def test_manifests_that_core_ml_refuses(package: Path, change: dict[str, Any]) -> None:
    """The truth is Apple's reader, which coremltools brings along."""
    file = package / "Manifest.json"
    manifest = json.loads(file.read_text())
    changed = (
        manifest
        if "fileFormatVersion" in change
        else next(
            item for item in manifest["itemInfoEntries"].values() if item["name"] == "weights"
        )
    )
    assert ModelPackage.isValid(str(package))
    for key, value in change.items():
        changed.pop(key) if value is None else changed.update({key: value})
    file.write_text(json.dumps(manifest))
    with pytest.raises(RuntimeError):
        ModelPackage(str(package)).getRootModel()
    refuses(package, "is not a package manifest|is missing")


def test_spec_that_is_not_a_protobuf(package: Path) -> None:
    (package / SPEC).write_bytes(b"\xff" * 10)
    refuses(package, "cannot be parsed")


def test_other_model_type(package: Path) -> None:
    edit_spec(package, lambda spec: spec.neuralNetwork.SetInParent())
    refuses(package, "holds no ML program .its type is neuralNetwork")


@pytest.mark.parametrize(
    ("version", "opset", "message"),
    [
        (99, "CoreML8", "is of version 99 of Core ML's specification; ML programs are of 6 to 10"),
        (5, "CoreML8", "is of version 5 of"),
        (6, "CoreML8", "ops are of CoreML8, which came with version 9 .*, and the package is of 6"),
        (10, "CoreML10", "main has ops of the unknown opset 'CoreML10'"),
    ],
)
def test_versions_that_do_not_fit(package: Path, version: int, opset: str, message: str) -> None:
    def edit(spec: Any) -> None:
        spec.specificationVersion = version
        (function,) = spec.mlProgram.functions.values()
        body = function.block_specializations.pop(function.opset)
        function.block_specializations[opset].CopyFrom(body)
        function.opset = opset

    edit_spec(package, edit)
    refuses(package, message)


def two_bodies(spec: Any) -> None:
    """A newer system might take the newer one."""
    (function,) = spec.mlProgram.functions.values()
    (body,) = function.block_specializations.values()
    function.block_specializations["CoreML9"].CopyFrom(body)


def describe(spec: Any, *names: str) -> None:
    for name in names:
        spec.description.functions.add(name=name, input=spec.description.input)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (two_bodies, "main has bodies for several opsets"),
        (lambda spec: setattr(spec.mlProgram, "version", 2), "an ML program of version 2, not 1"),
        (lambda spec: describe(spec, "main"), "describes its functions, and the whole besides"),
        (lambda spec: describe(spec, "main", "main"), "the functions main, main, and has main"),
        (lambda spec: describe(spec, "other"), "the functions other, and has main"),
        (lambda spec: spec.description.input.append(spec.description.input[0]), "have one name"),
        (
            lambda spec: [f.inputs.append(f.inputs[0]) for f in spec.mlProgram.functions.values()],
            "main has two inputs of one name",
        ),
    ],
)
def test_what_can_be_read_in_two_ways(
    package: Path, edit: Callable[[Any], Any], message: str
) -> None:
    edit_spec(package, edit)
    refuses(package, message)


def many_ops(spec: Any) -> None:
    (function,) = spec.mlProgram.functions.values()
    (body,) = function.block_specializations.values()
    for _ in range(100):
        body.operations.add()


def many_bodies(spec: Any) -> None:
    for _ in range(100):
        first(spec, "add").blocks.add()


@pytest.mark.parametrize("edit", [many_ops, many_bodies])
def test_too_many_ops_are_refused_before_they_are_read(
    package: Path, edit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five million empty ones took 10 MB, 26 s and 1.4 GB."""
    monkeypatch.setattr(reader, "MOST_OPS", 50)
    load(package)
    edit_spec(package, edit)
    refuses(package, "it has more than 50 ops")


def test_ops_of_all_functions_count(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit for each would let a file of 512 MB have 3.6 million: minutes, and 9 GB. They are
    counted first: those below the limit took 20 s, in vain."""

    def double(spec: Any) -> None:
        functions = spec.mlProgram.functions
        once = next(iter(functions.values()))  # before the map has an empty one too
        functions["again"].CopyFrom(once)

    count = sum(1 + len(function.ops) for function in load(package).functions.values())
    monkeypatch.setattr(reader, "MOST_OPS", count)
    load(package)
    edit_spec(package, double)
    monkeypatch.setattr(reader._Reader, "_op", lambda *_: pytest.fail("an op was read"))
    refuses(package, f"it has more than {count} ops")


@pytest.mark.parametrize("kind", ["add", "const"])
def test_bodies_in_ops_that_have_none(package: Path, kind: str) -> None:
    edit_spec(package, lambda spec: first(spec, kind).blocks.add())
    refuses(package, "it has bodies, which only conditions and loops have")


def test_no_functions(package: Path) -> None:
    edit_spec(package, lambda spec: spec.mlProgram.functions.clear())
    refuses(package, "without functions")


@pytest.mark.parametrize("name", ["../../escaped", "/tmp/escaped", "a/b", "..", "", "a\nb", "é"])
def test_names_of_functions_are_one_component_of_a_path(package: Path, name: str) -> None:
    def edit(spec: Any) -> None:
        functions = spec.mlProgram.functions
        functions[name].CopyFrom(functions["main"])

    edit_spec(package, edit)
    refuses(package, "is not a name of a function")


def test_values_that_are_read_before_they_are_made(package: Path) -> None:
    def edit(spec: Any) -> None:
        first(spec, "add").inputs["x"].arguments[0].name = "concat_0"

    edit_spec(package, edit)
    refuses(package, "add add_0: x is 'concat_0', which nothing has computed before")


def test_declared_shapes_that_are_not_computed(package: Path) -> None:
    def edit(spec: Any) -> None:
        first(spec, "add").outputs[0].type.tensorType.dimensions[0].constant.size = 13

    edit_spec(package, edit)
    refuses(package, r"add add_0: it computes the shape \(12,\), but add_0 is declared fp16 \(13\)")


def test_inputs_larger_than_memory(package: Path) -> None:
    def edit(spec: Any) -> None:
        (function,) = spec.mlProgram.functions.values()
        function.inputs[0].type.tensorType.dimensions[0].constant.size = 1 << 40

    edit_spec(package, edit)
    refuses(package, "has more than 268435456 elements")


def test_a_weight_that_is_read_again_and_again(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time takes memory of its own: ten thousand constants of one 10 MB would take 200 GB."""

    def edit(spec: Any) -> None:
        add = first(spec, "add")
        (function,) = spec.mlProgram.functions.values()
        (body,) = function.block_specializations.values()
        (own,) = (
            op for op in body.operations if op.outputs[0].name == add.inputs["y"].arguments[0].name
        )
        for number in range(3):
            again = body.operations.add()
            again.CopyFrom(own)
            again.outputs[0].name = f"again_{number}"

    monkeypatch.setattr(held, "MOST_HELD", 30)
    load(package)
    edit_spec(package, edit)
    refuses(package, "its ops hold more than 42 elements at one time")


def test_missing_weights(package: Path) -> None:
    (package / WEIGHTS).unlink()
    refuses(package, "the weight file .*weight.bin is missing")


def test_weights_outside_the_package(package: Path) -> None:
    def edit(spec: Any) -> None:
        weight(spec).fileName = "@model_path/../../../other.mlpackage/secret.bin"

    edit_spec(package, edit)
    refuses(package, "the weight file .* is outside the package")


def test_link_out_of_the_package(package: Path, tmp_path: Path) -> None:
    (package / WEIGHTS).rename(tmp_path / "moved.bin")
    (package / WEIGHTS).symlink_to(tmp_path / "moved.bin")
    refuses(package, "is outside the package")


@pytest.mark.parametrize("name", [SPEC, WEIGHTS])
def test_link_to_itself(package: Path, name: str) -> None:
    (package / name).unlink()
    (package / name).symlink_to(Path(name).name)
    refuses(package, "is outside the package")


@pytest.mark.parametrize("length", [0, 64, 80, 140])
def test_truncated_weights(package: Path, length: int) -> None:
    (package / WEIGHTS).write_bytes((package / WEIGHTS).read_bytes()[:length])
    refuses(package, r"weight.bin at byte 64: the file ends before")


def test_weights_without_a_record(package: Path) -> None:
    (package / WEIGHTS).write_bytes(b"\0" * 256)
    refuses(package, "there is no tensor record here")


def test_weights_of_another_type(package: Path) -> None:
    data = bytearray((package / WEIGHTS).read_bytes())
    data[68] = 3  # the dtype in the record: uint8
    (package / WEIGHTS).write_bytes(data)
    refuses(package, r"expected fp16 \(12,\), found uint8 in 24 bytes")


def test_unknown_parameter(package: Path) -> None:
    def edit(spec: Any) -> None:
        op = first(spec, "softmax")
        op.inputs["temperature"].CopyFrom(op.inputs["axis"])

    edit_spec(package, edit)
    refuses(package, "softmax softmax_0: input 'temperature' is not supported")


def test_missing_parameter(package: Path) -> None:
    edit_spec(package, lambda spec: first(spec, "add").inputs.pop("y"))
    refuses(package, "add add_0: input y is missing")


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_damage_escapes_as_another_error(good: Path, package: Path, data: st.DataObject) -> None:
    spec = bytearray((good / SPEC).read_bytes())
    position = data.draw(st.integers(0, len(spec) - 1))
    spec[position] = data.draw(st.integers(0, 255))
    (package / SPEC).write_bytes(spec)
    with contextlib.suppress(CetaneError):
        program = load(package)
        run = Executable(next(iter(program.functions.values())))
        run({"x": TABLE})
