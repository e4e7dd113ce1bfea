"""A bundle is what was built, or it is refused."""

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from cetane.bundle import Bundle
from cetane.errors import CetaneError, printable
from cetane.schema.manifest import SCHEMA

FILES = (
    "embedding.npy",
    "rotary-default.npy",
    "tokenizer/tokenizer.json",
    "tokenizer/chat_template.jinja",
    "shards/model.mlpackage/Manifest.json",
    "shards/model.mlpackage/Data/com.apple.CoreML/model.mlmodel",
    "shards/model.mlpackage/Data/com.apple.CoreML/weights/weight.bin",
)
DECODE = {"verify": None, "prefill": None}


@pytest.fixture
def path(tiny_bundle: Callable[..., Bundle], tmp_path: Path) -> Path:
    """A bundle to damage."""
    original = tiny_bundle(contract="stateful", layout={"kind": "single"}, tensor_layout="ct1",
                           head={"slices": 2})  # fmt: skip
    target = tmp_path / "bundle"
    shutil.copytree(original.path, target)
    return target


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the manifest: `change` gets its content and may return another."""
    file = path / "manifest.json"
    content = json.loads(file.read_text())
    replaced = change(content)
    file.write_text(json.dumps(content if replaced is None else replaced))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def append(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def test_round_trip(path: Path) -> None:
    bundle = Bundle(path)
    bundle.verify()
    assert bundle.manifest.model_validate_json(bundle.manifest.model_dump_json()) == bundle.manifest
    on_disk = {
        p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob("*") if p.is_file()
    }
    del on_disk["manifest.json"]
    assert {name: record.bytes for name, record in bundle.manifest.files.items()} == on_disk
    assert set(FILES) <= set(on_disk)
    assert bundle.tables().embedding[0].dtype == np.float16


@pytest.mark.parametrize("damage", [flip, truncate, append, Path.unlink])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_was_changed(path: Path, name: str, damage: Callable[[Path], None]) -> None:
    damage(path / name)
    with pytest.raises(CetaneError, match=name):
        Bundle(path).verify()


@pytest.mark.parametrize("name", ["extra.bin", "shards/model.mlpackage/Data/x", "tokenizer/.x"])
def test_a_file_that_is_not_listed(path: Path, name: str) -> None:
    (path / name).write_bytes(b"x")
    with pytest.raises(CetaneError, match=f"{name} is not in the manifest .move it away"):
        Bundle(path).verify()


def test_measurements_that_lie_among_the_shards(path: Path) -> None:
    """As cetane kept them once."""
    (path / "shards" / "model.measured.json").write_bytes(b"{}")
    with pytest.raises(CetaneError, match=r"model\.measured\.json is not in the") as error:
        Bundle(path).verify()
    assert str(error.value.hint).startswith("move it away")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "shards/../../outside"])
def test_a_manifest_that_points_outside(path: Path, name: str) -> None:
    (path.parent / "outside").write_bytes(b"")
    edit(path, lambda content: content["files"].update({name: {"bytes": 0, "sha256": ""}}))
    with pytest.raises(
        CetaneError, match=f"points outside the bundle: {re.escape(printable(name))}"
    ):
        Bundle(path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 256])
def test_a_name_that_no_disk_takes(path: Path, name: str) -> None:
    edit(path, lambda content: content["files"].update({name: {"bytes": 0, "sha256": ""}}))
    with pytest.raises(CetaneError, match="no disk takes the name"):
        Bundle(path)


def test_a_plan_without_its_caches_size(path: Path) -> None:
    edit(path, lambda content: content["plan"].update(kv_bytes={}))
    with pytest.raises(CetaneError, match="kv_bytes: none at"):
        Bundle(path)


@pytest.mark.parametrize("name", ["embedding.npy", "shards"])
def test_a_symlink_that_leads_outside(path: Path, name: str) -> None:
    """Even when what it leads to is right."""
    shutil.move(path / name, path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / name)
    with pytest.raises(CetaneError, match=f"{name} is a link"):
        Bundle(path)


def test_a_step_that_calls_nothing(path: Path) -> None:
    edit(path, lambda c: c["plan"]["modes"]["decode"]["steps"][0].update(function="missing"))
    with pytest.raises(CetaneError, match="/missing: no such function"):
        Bundle(path)


def test_a_shard_name_that_points_outside(path: Path) -> None:
    def rename(content: Any) -> None:
        content["plan"]["shards"][0].update(name="../../outside")
        for mode in content["plan"]["modes"].values():
            for step in (mode["steps"][0], mode["silent"][0]):
                step.update(shard="../../outside")

    edit(path, rename)
    with pytest.raises(CetaneError, match=r"plan\.shards\.0\.name: String should match pattern"):
        Bundle(path)


def many() -> dict[str, Any]:
    """More files than a reader looks up in a few seconds."""
    return {f"f/{number}": {"bytes": 0, "sha256": ""} for number in range(1 << 14)}


def without(*keys: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(schema_version=SCHEMA + 1), f"schema {SCHEMA + 1}"),
        (lambda c: c.update(schema_version="1"), "no schema_version"),
        (without("schema_version"), "not a manifest.*schema_version"),
        (without("plan"), "plan: Field required"),
        (without("files"), "files: Field required"),
        (without("plan", "shards"), "plan.shards: Field required"),
        (without("plan", "recipe", "name"), "plan.recipe.name: Field required"),
        (lambda c: c.update(more=1), "more: unknown key; did you mean 'source'"),
        (lambda c: c["plan"]["recipe"]["cache"].update(contract="none"), "cache.contract"),
        (lambda c: c["files"].update({"x": {"bytes": "many", "sha256": ""}}), "files.x.bytes"),
        (lambda c: c["files"].update(many()), r"files: Dictionary should have at most 16384 items"),
        (lambda c: [c], "holds a JSON list"),
        (lambda c: 7, "holds a JSON int"),
    ],
)
def test_a_manifest_that_is_wrong(path: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(path, change)
    with pytest.raises(CetaneError, match=message):
        Bundle(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": 1}' * 2, b'{"files": 1, "files": 2}'],
)
def test_a_manifest_that_is_not_json(path: Path, content: bytes) -> None:
    (path / "manifest.json").write_bytes(content)
    with pytest.raises(CetaneError, match=r"manifest\.json (is not valid JSON|holds a JSON)"):
        Bundle(path)


@pytest.mark.parametrize(
    ("made", "message", "hint"),
    [
        ([], "x y: no such bundle", "cetane port MODEL makes one"),
        (["x y.partial/key.json"], "x y: no such bundle", "it continues where it stopped"),
        (["x y/notes.txt"], "so not a complete bundle", "cetane port MODEL makes one"),
        (["x y/a", "x y.partial/a"], "not a complete bundle", "it continues where it stopped"),
        (["x y/config.json"], "x y: a model, not a bundle", "cetane port '"),
        (["x y/contract.json"], "x y: an export, not a bundle", "the bundle that was exported"),
        (["x y/config.json", "x y/meta.yaml"], "an export, not", "the bundle that was exported"),
        (["x y/d0/decode.onnx"], "x y: an export, not", "the bundle that was exported"),
        (["x y/kit.json"], "x y: a kit, not a bundle", "a bundle that the kit was made of"),
    ],
)
def test_what_is_no_bundle(made: list[str], message: str, hint: str, tmp_path: Path) -> None:
    for name in made:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(CetaneError) as told:
        Bundle(tmp_path / "x y")
    assert message in told.value.message
    assert told.value.hint is not None and hint in told.value.hint
    assert ("continues" in told.value.hint) == ("x y.partial" in str(made))


def test_only_an_unfinished_port_is_told_to_resume(tmp_path: Path) -> None:
    unfinished = tmp_path / "x.partial"
    with pytest.raises(CetaneError, match=r"no such bundle .give the folder of a bundle"):
        Bundle(unfinished)
    unfinished.mkdir()
    with pytest.raises(CetaneError, match="continues where it stopped"):
        Bundle(unfinished)


@pytest.mark.parametrize(
    ("name", "message"),
    [("m.gguf", "a model"), ("m.safetensors", "a model"), ("kit.zip", "a kit"), ("m", "no man")],
)
def test_a_file_that_is_no_bundle(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(CetaneError, match=f"{name}: {message}"):
        Bundle(tmp_path / name)


def save(file: Path, array: np.ndarray) -> None:
    with file.open("wb") as stream:
        np.save(stream, array, allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("embedding.npy", np.zeros((288, 65), np.float16), r"shape \(288, 65\)"),
        ("embedding.npy", np.zeros((64, 288), np.float16), r"shape \(64, 288\)"),
        ("embedding.npy", np.zeros(288 * 64, np.float16), r"shape \(18432,\)"),
        ("embedding.npy", np.array([{"a": 1}], dtype=object), "not an array of numbers"),
        ("rotary-default.npy", np.zeros((2, 32, 16), np.float32), r"shape \(2, 32, 16\)"),
        ("rotary-default.npy", np.zeros((2, 64), np.float32), r"shape \(2, 64\)"),
    ],
)
def test_a_table_of_the_wrong_shape(path: Path, name: str, array: np.ndarray, message: str) -> None:
    save(path / name, array)
    with pytest.raises(CetaneError, match=f"{name}.*{message}"):
        Bundle(path).tables()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04" + bytes(64), b"\x93NUMPY\x01\x00"])
def test_a_table_that_is_no_array(path: Path, content: bytes) -> None:
    (path / "embedding.npy").write_bytes(content)
    with pytest.raises(CetaneError, match=r"embedding\.npy"):
        Bundle(path).tables()


def test_a_pickled_table_is_never_loaded(path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (os.mkdir, (str(path / "pwned"),))

    save(path / "embedding.npy", np.array([Evil()], dtype=object))
    with pytest.raises(CetaneError):
        Bundle(path).tables()
    assert not (path / "pwned").exists()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", ["gates", "more", "shards/more", "gates/golden.json"])
def test_a_link_anywhere(path: Path, name: str, inside: bool) -> None:
    """A linked folder shows what is elsewhere, and a copy of the bundle would carry it out."""
    target = path / "tokenizer" if inside else path.parent / "elsewhere"
    target.mkdir(exist_ok=True)
    (path / name).parent.mkdir(exist_ok=True)
    os.symlink(target, path / name)
    with pytest.raises(CetaneError, match=f"{name} is a link"):
        Bundle(path)


@pytest.mark.parametrize("name", ["gates/golden.json", "pipe", "heads/medusa/head.json"])
def test_a_pipe_blocks_nobody(path: Path, name: str) -> None:
    (path / name).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path / name)
    with pytest.raises(CetaneError, match=f"{name} is neither a file nor a folder"):
        Bundle(path)


def test_a_link_that_appears_later(path: Path) -> None:
    bundle = Bundle(path)
    (path / "gates").mkdir(exist_ok=True)
    os.symlink("/dev/zero", path / "gates" / "golden.json")
    with pytest.raises(CetaneError, match="it is a link"):
        bundle.gates()


def test_a_bundle_that_may_not_be_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read and judged; its verdict is kept nowhere."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EROFS, "Read-only file system")

    bundle = Bundle(path)
    monkeypatch.setattr("cetane.bundle.folder.write_json", refuse)
    assert not bundle.write_gate("golden", {"passed": True})
    assert "golden" not in Bundle(path).gates()


HEADER = b"\x93NUMPY\x01\x00"


@pytest.mark.parametrize(
    "text",
    [
        b"{'descr': '|O', 'fortran_order': False, 'shape': (2, 2), }",
        b"{'descr': '<f2', 'fortran_order': True, 'shape': (2, 2), }",
        b"{'descr': '<f2', 'fortran_order': False, 'shape': (-1, 2), }",
        b"{'descr': '<f2', 'fortran_order': False, 'shape': (99999999999999, 2), }",
        b"{'descr': '<f2', 'fortran_order': False, 'shape': (2, 2), 'more': 1, }",
        b"[" * 40_000,
        b"9" * 60_000,
    ],
)
def test_a_table_whose_header_is_not_the_plans(path: Path, text: bytes) -> None:
    content = HEADER + len(text).to_bytes(2, "little") + text + bytes(8)
    (path / "embedding.npy").write_bytes(content)
    with pytest.raises(CetaneError, match=r"embedding\.npy"):
        Bundle(path).tables()


def test_gate_results(path: Path) -> None:
    """They are kept beside the files, and count for the very build that they were measured on."""
    bundle = Bundle(path)
    assert bundle.gates() == {}
    bundle.write_gate("golden", {"passed": True})
    bundle.verify()
    assert Bundle(path).gates() == {"golden": {"passed": True}}

    edit(path, lambda content: content["producer"].update(cetane="another"))
    assert Bundle(path).digest != bundle.digest
    assert Bundle(path).gates() == {}


def test_a_gate_result_that_is_broken(path: Path) -> None:
    Bundle(path).write_gate("golden", {"passed": True})
    (path / "gates/golden.json").write_text("{")
    with pytest.raises(CetaneError, match=r"golden\.json is not valid JSON"):
        Bundle(path).gates()


@pytest.mark.parametrize(("number", "size"), [(129, 60), (3, 1 << 25)])
def test_gate_results_beyond_all_bounds(path: Path, number: int, size: int) -> None:
    """No manifest lists them, so each is small, and together they filled the memory."""
    bundle = Bundle(path)
    for index in range(number):
        bundle.write_gate(f"gate{index}", {"passed": True})
        os.truncate(path / f"gates/gate{index}.json", size)
    with pytest.raises(CetaneError, match=f"holds {number} results of {number * size:,} bytes"):
        bundle.gates()


def test_an_int8_embedding(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    made = tiny_bundle(embedding={"format": "int8"}, **DECODE)
    weights = load_file(tiny_checkpoint_folder / "model.safetensors")["model.embed_tokens.weight"]
    rows = made.tables().embedding[np.array([3, 7])]
    step = weights[[3, 7]].abs().amax(1, keepdim=True).numpy() / 127
    assert (np.abs(rows - weights[[3, 7]].numpy()) <= step).all()
    copy = tmp_path / "copy"
    shutil.copytree(made.path, copy)
    np.save(copy / "embedding-scales.npy", np.zeros(5, np.float16))
    with pytest.raises(CetaneError, match=r"embedding-scales\.npy: float16 of shape \(5,\)"):
        Bundle(copy).tables()


@pytest.mark.parametrize(
    ("file", "array"),
    [
        ("embedding.npy", np.zeros((288, 64), np.uint8)),
        ("embedding.npy", np.zeros((288, 32), np.int8)),
        ("embedding-scales.npy", np.zeros((288,), np.float16)),
        ("embedding-scales.npy", np.zeros((288, 2), np.float32)),
    ],
    ids=str,
)
def test_an_int4_embedding_of_another_form(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path, file: str, array: np.ndarray
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle(embedding={"format": "int4"}, **DECODE).path, copy)
    np.save(copy / file, array)
    with pytest.raises(CetaneError, match=f"{file}: {array.dtype} of shape .*, not"):
        Bundle(copy).tables()


def test_a_manifest_with_an_odd_number_of_columns(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle(embedding={"format": "int4"}, **DECODE).path, copy)
    edit(copy, lambda c: c["plan"]["tables"].update(more={"rows": 288, "channels": 33}))
    with pytest.raises(CetaneError, match="two columns in a byte, but a table has 33 columns"):
        Bundle(copy).tables()
