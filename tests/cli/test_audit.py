"""cetane audit, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.gates.residency.cases import half, many_convs
from tests.gates.residency.graphs import Model, mb

from cetane.bundle import Bundle
from cetane.gates.residency.measured import Measured, specification
from cetane.gates.residency.rule import load_rules
from cetane.mil import load

from .conftest import Cetane

WIDE = {"x": ((1, 2048, 1, 8), "fp16")}


def clean(x: Any) -> Any:
    return mb.tanh(x=mb.mul(x=many_convs(x, 2, "lut4"), y=half((), 2)))


def tailed(x: Any) -> Any:
    return mb.reduce_argmax(x=clean(x), axis=1)


def islanded(x: Any) -> Any:
    wide = mb.softmax(x=mb.cast(x=many_convs(x, 2, "lut4"), dtype="fp32"), axis=1)
    return mb.relu(x=mb.cast(x=wide, dtype="fp16"))


def package(body: Any, folder: Path) -> Path:
    Model(body, inputs=WIDE).program(folder)
    return folder / "model.mlpackage"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return package(clean, tmp_path)


def unseen(x: Any) -> Any:
    return mb.band_part(x=clean(x), lower=-1, upper=0)


def test_ops_of_unknown_place_are_named(cetane: Cetane, tmp_path: Path) -> None:
    """They pass: nobody knows where they run. So a user must see which they are."""
    found = cetane("audit", package(unseen, tmp_path))
    assert found.code == 0
    assert "leaves them out: band_part (1)" in " ".join(found.out.split())


def test_a_clean_package(cetane: Cetane, good: Path) -> None:
    found = cetane("audit", good, "--json")
    assert found.code == 0
    content = found.json
    assert content["basis"] == "predicted"
    assert content["passed"] is True
    (function,) = content["functions"]
    assert function["table"] == {
        "conv_total": 2, "conv_ane": 2, "conv_non_ane": 0, "ops": 4, "ops_ane": 4, "ops_cpu": 0,
        "ops_unknown": 0, "ops_fail": 0, "ops_wrong": 0,
    }  # fmt: skip
    assert [(op["kind"], op["placement"], op["rule"]) for op in function["ops"]] == [
        ("conv", "ANE", "seen-projections"), ("conv", "ANE", "seen-projections"),
        ("mul", "ANE", "seen-elementwise"), ("tanh", "ANE", "seen-elementwise"),
    ]  # fmt: skip
    shown = cetane("audit", good)
    assert shown.code == 0
    assert "residency for m4-max, OS 26: predicted" in shown.out
    assert "residency, predicted: pass" in shown.out
    assert not list(good.parent.glob("*.json"))  # it was read, nothing else


def test_a_tail_is_a_finding_and_no_failure(cetane: Cetane, tmp_path: Path) -> None:
    found = cetane("audit", package(tailed, tmp_path), "--json")
    assert found.code == 0
    (function,) = found.json["functions"]
    assert {f["rule"]: f["severity"] for f in function["findings"]} == {
        "argmax": "perf", "unaligned-last-axis": "info",
    }  # fmt: skip
    assert function["table"]["ops_cpu"] == 3


def test_an_island_fails(cetane: Cetane, tmp_path: Path) -> None:
    path = package(islanded, tmp_path)
    shown = cetane("audit", path)
    assert shown.code == 1
    assert "silent: fp32-island" in shown.out
    assert "predicted  CPU, confidence high" in shown.out
    assert "where      model/main" in shown.out
    assert "residency, predicted: FAIL" in shown.out
    assert cetane("audit", path, "--json").json["reasons"] == ["silent: fp32-island"]


def test_scope(cetane: Cetane, tmp_path: Path) -> None:
    """The same package fails for a phone only."""

    def quantized(x: Any) -> Any:
        stored = mb.quantize(input=many_convs(x, 2, "lut4"), scale=half((), 1), output_dtype="int8")
        return mb.dequantize(input=stored, scale=half((), 1))

    path = package(quantized, tmp_path)
    assert cetane("audit", path).code == 0
    assert cetane("audit", path, "--chip", "a19-pro").code == 1
    found = cetane("audit", path, "--chip", "z80")
    assert found.error.startswith("no chip 'z80'; known: m1")
    assert cetane("audit", path, "--chip", "").error.startswith("no chip ''; known: m1")


def test_explain(cetane: Cetane) -> None:
    shown = cetane("audit", "--explain", "program-constants").out
    for part in ("2 GiB", "fix: cut it into shards", "ane-book", "2026-05", "confidence high"):
        assert part in shown
    assert "Phi-4-mini" in cetane("audit", "--explain", "seen-projections").out
    assert cetane("audit", "--explain", "argmax", "--json").json["severity"] == "perf"
    assert cetane("audit", "--explain", "nothing").error == "no rule 'nothing'"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rules", "--chip", "a19-pro"], "--chip does nothing"),
        (["--explain", "argmax", "--verbose"], "--verbose does nothing"),
        (["bundle", "--rules"], "PACKAGE|BUNDLE does nothing"),
        (["--explain", "argmax", "--rules"], "--explain does nothing"),
        (["--rules", "--markdown", "--json"], "--markdown is for --rules, without --json"),
        (["--explain", "argmax", "--markdown"], "--markdown is for --rules, without --json"),
    ],
)
def test_what_rules_would_ignore(cetane: Cetane, options: list[str], said: str) -> None:
    assert cetane("audit", *options).error.startswith(said)


def test_rules(cetane: Cetane) -> None:
    listed = cetane("audit", "--rules", "--json").json
    assert [rule["id"] for rule in listed] == list(load_rules())
    assert "fp32-island" in cetane("audit", "--rules").out


def test_the_page_of_rules_is_up_to_date(cetane: Cetane) -> None:
    """`cetane audit --rules --markdown > docs/reference/residency.md`."""
    page = Path(__file__).parents[2] / "docs" / "reference" / "residency.md"
    assert cetane("audit", "--rules", "--markdown").out == page.read_text()


def test_bad_paths(cetane: Cetane, tmp_path: Path) -> None:
    assert cetane("audit").error.startswith("cetane audit needs a package or a bundle")
    assert "neither an .mlpackage nor a bundle" in cetane("audit", tmp_path / "nothing").error
    assert "neither an .mlpackage nor a bundle" in cetane("audit", tmp_path).error
    (tmp_path / "Manifest.json").write_text("{}")
    assert "not a package manifest" in cetane("audit", tmp_path).error


def measurements(path: Path, device: str) -> str:
    """What a Mac would have written that runs every op on one device."""
    ops = [
        {"output": op.outputs[0].name, "kind": op.kind, "device": device}
        for op in load(path).functions["main"].ops
    ]
    said = {
        "machine": "Apple M4 Max", "system": "macOS 26.1", "tools": "coremltools 9.0",
        "date": "2026-11-20",
        "packages": {path.stem: {"specification": specification(path),
                                 "functions": {"main": {"ops": ops}}}},
    }  # fmt: skip
    return Measured.model_validate(said).model_dump_json()


def test_measured(cetane: Cetane, good: Path, tmp_path: Path) -> None:
    """It wins, is shown beside the prediction, and is kept beside the package."""
    file = tmp_path / "from-a-mac.json"
    file.write_text(measurements(good, "CPU"))
    found = cetane("audit", good, "--measured", file)
    assert found.code == 1
    assert "residency for Apple M4 Max, macOS 26.1: measured" in found.out
    assert "measured on Apple M4 Max, macOS 26.1, 2026-11-20: 0 of 4 ops as predicted" in found.out
    assert "predicted otherwise" in found.out
    file.unlink()
    again = cetane("audit", good, "--json").json
    assert again["basis"] == "measured"
    assert again["measured"] == "Apple M4 Max, macOS 26.1, 2026-11-20"
    rebuilt = package(tailed, tmp_path)
    assert "another build" in cetane(
        "audit", rebuilt, "--measured", tmp_path / "model.measured.json"
    ).error  # fmt: skip
    assert cetane("audit", rebuilt, "--json").json["basis"] == "predicted", "nobody named the file"


@pytest.mark.parametrize(
    ("options", "basis", "target"),
    [
        ([], "measured", "Apple M4 Max, macOS 26.1"),
        (["--chip", "m4-max"], "measured", "Apple M4 Max, macOS 26.1"),
        (["--os", "26"], "measured", "Apple M4 Max, macOS 26.1"),
        (["--chip", "a13"], "predicted", "a13, OS 26"),
        (["--os", "16"], "predicted", "m4-max, OS 16"),
        (["--os", "macOS 13.5"], "predicted", "m4-max, OS 16"),
    ],
)
def test_a_measurement_speaks_of_its_machine_alone(
    cetane: Cetane, good: Path, tmp_path: Path, options: list[str], basis: str, target: str
) -> None:
    """These programs need system 18. No measurement on another system refutes that."""
    file = tmp_path / "from-a-mac.json"
    file.write_text(measurements(good, "ANE"))
    assert cetane("audit", good, "--measured", file).code == 0
    found = cetane("audit", good, *options)
    assert found.code == ("OS 16" in target)
    assert f"residency for {target}: {basis}" in found.out
    silent = f"what was measured on Apple M4 Max, macOS 26.1 says nothing of {target}"
    assert (silent in found.err) is (basis == "predicted")
    again = cetane("audit", good, "--measured", file, *options, "--json").json
    assert again["basis"] == basis
    assert (again["measured"] is None) is (basis == "predicted")


@pytest.mark.parametrize("system", ["0", "nan", "inf", "Windows 11", "macOS", ""])
def test_what_is_no_system(cetane: Cetane, good: Path, system: str) -> None:
    wrong = cetane("audit", good, "--os", system)
    assert wrong.code == 2
    assert f"--os {system!r}: no system\nwrite 'macOS 15'" in wrong.err


def test_measure_needs_a_mac(cetane: Cetane, good: Path) -> None:
    if sys.platform != "darwin":
        assert cetane("audit", good, "--measure").error.startswith("only a Mac can measure")


def test_a_bundle(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    """Every function of every shard; the verdict is kept with the other gates."""
    bundle = Bundle(Path(shutil.copytree(ported.path, tmp_path / "bundle")))
    content = cetane("audit", bundle.path, "--json").json
    assert {(f["package"], f["function"]) for f in content["functions"]} == set(
        bundle.plan.functions
    )
    gate = bundle.gates()["residency"]
    assert gate["passed"] is content["passed"]
    assert gate["findings"]["tiny-program"] == "risk"
    bundle.verify()
    told = " ".join(cetane("info", bundle.path).out.split())
    verdict = "pass" if gate["passed"] else "FAIL"
    assert f"gate residency {verdict}, predicted for {gate['target']}" in told

    shard = bundle.plan.shards[0].name
    file = tmp_path / "from-a-mac.json"
    file.write_text(measurements_of_all(bundle, shard))
    assert cetane("audit", bundle.path, "--measured", file).code == 0
    assert cetane("audit", bundle.path, "--json").json["passed"] is True
    assert bundle.gates()["residency"]["basis"] == "measured"
    assert cetane("info", bundle.path).code == 0

    with pytest.MonkeyPatch.context() as read_only:
        read_only.setattr(Bundle, "write_gate", lambda *_: False)
        told = "note: the bundle is read-only, so this is not kept"
        assert told in cetane("audit", bundle.path, "--measured", file).err

    bundle.write_gate("residency-measured", {"measured": {"machine": 1}})
    assert "not measurements of a Mac" in cetane("audit", bundle.path).error


def test_a_package_of_a_bundle(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    """Its measurements are kept with the bundle, which holds no file beside its shards."""
    bundle = Bundle(Path(shutil.copytree(ported.path, tmp_path / "bundle")))
    shard = bundle.plan.shards[0].name
    file = tmp_path / "from-a-mac.json"
    file.write_text(measurements_of_all(bundle, shard))
    assert cetane("audit", bundle.shard(shard), "--measured", file).code == 0
    assert cetane("audit", bundle.shard(shard), "--json").json["basis"] == "measured"
    assert cetane("audit", bundle.path, "--json").json["measured"]
    bundle.verify()


@pytest.mark.parametrize("command", [("audit",), ("report", "-o", "page.html")])
def test_a_bundle_that_was_changed(
    cetane: Cetane, ported: Bundle, tmp_path: Path, command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It is judged by no command, and nothing is written into it."""
    monkeypatch.chdir(tmp_path)
    bundle = Path(shutil.copytree(ported.path, tmp_path / "bundle"))
    weights = next(bundle.rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    gates = sorted(bundle.glob("gates/*"))
    assert "its hash differs" in cetane(command[0], bundle, *command[1:]).error
    assert sorted(bundle.glob("gates/*")) == gates


def measurements_of_all(bundle: Bundle, shard: str) -> str:
    """Every op of every function of a shard on the ANE."""
    functions = {
        name: {"ops": [{"output": op.outputs[0].name if op.outputs else "", "kind": op.kind,
                        "device": "ANE"} for op in function.ops]}
        for name, function in load(bundle.shard(shard)).functions.items()
    }  # fmt: skip
    package = {"specification": specification(bundle.shard(shard)), "functions": functions}
    return json.dumps({
        "machine": "Apple M4 Max", "system": "macOS 26.1", "tools": "coremltools 9.0",
        "date": "2026-11-20", "packages": {shard: package},
    })  # fmt: skip


def test_it_needs_neither_torch_nor_coremltools(good: Path) -> None:
    """Importing those takes longer than auditing may."""
    code = (
        "import sys; from cetane.cli import main; sys.argv = ['cetane', 'audit', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'coremltools', 'transformers'} & set(sys.modules)))"
    )
    started = time.perf_counter()
    run = subprocess.run([sys.executable, "-c", code, good], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr
    assert time.perf_counter() - started < 30


def test_rules_under_any_locale() -> None:
    """Files that come with cetane are UTF-8, whatever the user's locale is."""
    ascii_only = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    run = subprocess.run(
        [sys.executable, "-m", "cetane", "audit", "--rules", "--json"],
        capture_output=True, text=True, env=os.environ | ascii_only,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    claims = [source["claim"] for rule in json.loads(run.stdout) for source in rule["sources"]]
    assert any("mean(x²)" in claim for claim in claims)
