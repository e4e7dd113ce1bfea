"""Commands about devices: kits, imports, two bundles beside each other, break-even, units."""

import json
import plistlib
import zipfile
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle

Cetane = Any


def test_a_kit_and_files_that_are_not_its_record(
    cetane: Cetane, gated: Bundle, tmp_path: Path
) -> None:
    made = cetane("kit", gated.path, "-o", tmp_path / "kit.zip", "--json").json
    assert made["bundles"] == {"A": gated.path.name} and made["functions"] == 3
    assert len(zipfile.ZipFile(tmp_path / "kit.zip").namelist()) > 20
    shown = cetane("kit", gated.path, "-o", tmp_path / "kit.zip").out
    assert "uv run measure.py" in shown
    assert f"then here: cetane import measurements.json {gated.path}\n" in shown
    for name in ("nothing.json", "nothing.mil"):
        assert "no such file" in cetane("import", tmp_path / name, gated.path).error
    (tmp_path / "x.json").write_text("{}")
    assert "not the measurements" in cetane("import", tmp_path / "x.json", gated.path).error
    (tmp_path / "x.mlperf").mkdir()
    assert "report.json" in cetane("import", tmp_path / "x.mlperf", gated.path).error
    assert "about one package" in cetane("import", tmp_path / "x.mlperf").error


@pytest.fixture
def power(tmp_path: Path) -> Path:
    """A file of powermetrics: 5 W for 10 s, which are 50 J."""
    samples = [
        {"elapsed_ns": 10**9, "timestamp": datetime(2026, 11, 22, 12, 0, second),
         "processor": {"cpu_energy": 2000, "gpu_energy": 0, "ane_energy": 3000}}
        for second in range(1, 11)
    ]  # fmt: skip
    path = tmp_path / "power.plist"
    path.write_bytes(b"\0".join(map(plistlib.dumps, samples)))
    return path


def test_energy_of_a_load(cetane: Cetane, gated: Bundle, power: Path) -> None:
    """By hand: 50 J of 100 tokens are 0.5 J each."""
    made = cetane("import", power, gated.path, "--tokens", 100, "--json").json
    assert made["joules_per_token"]["processor"] == pytest.approx(0.5)
    assert made["watts"] == {"ane": 3.0, "cpu": 2.0, "gpu": 0.0} and made["caveats"]
    assert gated.gates()["energy"]["joules_per_token"]["ane"] == pytest.approx(0.3)
    assert "processor  0.5 J" in cetane("import", power, "--tokens", 100).out
    assert "joules_per_token" in json.dumps(cetane("import", power, "--json").json)
    assert "--tokens" in cetane("import", power, gated.path).err


def test_an_import_refuses_what_it_would_ignore(
    cetane: Cetane, ported: Bundle, power: Path, tmp_path: Path
) -> None:
    kit, xcode = tmp_path / "x.json", tmp_path / "x.mlperf"
    kit.write_text("{}")
    xcode.mkdir()
    twice = ("import", power, ported.path, ported.path, "--tokens", 100)
    assert "is about one load" in cetane(*twice).error
    for words in ((ported.path,), (ported.path, kit)):  # their order is easily confused
        assert cetane("import", *words).error == f"{ported.path} is a bundle, and no file of a Mac"
    for file in (kit, xcode):
        error = cetane("import", file, ported.path, "--tokens", 100).error
        assert error == "--tokens is for a power meter's file"
    for file in (power, xcode):
        error = cetane("import", file, ported.path, "--model", "here").error
        assert error == "--model is for a kit's measurements"


def test_a_read_only_bundle_keeps_no_energy(
    cetane: Cetane, ported: Bundle, power: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bundle, "write_gate", lambda *_: False)
    shown = cetane("import", power, ported.path, "--tokens", 100)
    assert "processor  0.5 J" in shown.out
    assert "note: the bundle is read-only, so this is not kept" in shown.err


def test_two_bundles_beside_each_other(cetane: Cetane, ported: Bundle) -> None:
    pair = ("bench", ported.path, ported.path, "--prompt-tokens", 9, "--max-new", 3)
    made = cetane(*pair, "--rounds", 2, "--json").json
    assert len(made["turns"]) == 2 and len(made["turns"][0]["decode_ms"]) == 2
    shown = cetane(*pair, "--rounds", 2).out
    for figure in ("decode, ms a token", "prefill", "first token", "load again"):
        assert figure in shown
    assert "do not fit" in cetane("bench", ported.path, ported.path).error


def test_break_even_from_ones_own_milliseconds(cetane: Cetane) -> None:
    """ane-book's experiment 35: a call of 4 takes 483 ms, a step 109: no acceptance pays."""
    made = cetane("break-even", "--t1", 109, "--tv", 483, "--k", 4, "--json").json
    assert made["slowdown"] == pytest.approx(483 / 109) and made["pays"] is False
    assert made["share"] is made["chance"] is None
    assert "no acceptance pays" in cetane("break-even", "--t1", 109, "--tv", 483, "--k", 4).out
    made = cetane("break-even", "--t1", 100, "--tv", 130, "--k", 4, "--json").json
    assert made["share"] == pytest.approx(0.1) and made["ceiling"] == pytest.approx(4 / 1.3)
    assert "10.0% of drafted" in cetane("break-even", "--t1", 100, "--tv", 130, "--k", 4).out
    slow, quick = ("break-even", "--t1", 1, "--tv"), ("break-even", "--t1", 10, "--tv")
    assert "which ane-book calls break-even" in cetane(*slow, 5, "--k", 4).out
    assert "ane-book" not in cetane(*quick, 2, "--k", 4).out  # its formula gives -1900 %
    assert "4.00 times plain decoding" in cetane(*quick, 2, "--k", 4).out


@pytest.mark.parametrize(
    ("t1", "tv", "k", "draft", "error"),
    [
        (0, 5, 4, 0, "t1 = 0: no time"),
        (5, -1, 4, 0, "tv = -1: no time"),
        (5, 5, 1, 0, "k = 1: no number"),
        (1, 2, 10**9, 0, "k = 1000000000: no number"),
        (5, 5, 4, -1, "draft = -1: no time"),
        (1e-300, 1e300, 4, 0, "t1 = 1e-300 and tv = 1e+300: no call takes so many plain steps"),
    ],
)
def test_break_even_of_what_is_no_time(
    cetane: Cetane, t1: float, tv: float, k: int, draft: float, error: str
) -> None:
    wrong = cetane("break-even", "--t1", t1, "--tv", tv, "--k", k, "--draft", draft)
    assert error in wrong.error


def test_compute_units_choose_core_ml(cetane: Cetane, ported: Bundle) -> None:
    run = ("run", ported.path, "Hi", "--max-new", 2, "--compute-units")
    assert "macOS 15" in cetane(*run, "CPU_AND_GPU").error
    assert "has no compute units" in cetane(*run, "ALL", "--backend", "portable").error
