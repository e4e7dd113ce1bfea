"""A kit's script under faults: nothing that was measured is lost, and every fault is told."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.measuring.conftest import environment, record, run

from cetane.measuring.children import command
from cetane.measuring.functions import error
from cetane.measuring.record import seal
from cetane.measuring.run import KitMeasurement


def faults(kit: Path) -> dict[str, str]:
    return {fault["job"]: fault["kind"] for fault in record(kit)["faults"]}


def turns(kit: Path) -> list[str]:
    return [turn["bundle"] for turn in record(kit)["turns"]]


def test_without_faults_all_is_there(kit: Path) -> None:
    done = run(kit)
    assert done.returncode == 0, done.stderr
    content = record(kit)
    assert content["finished"] and not content["faults"]
    assert content["seal"] == seal(content)
    assert turns(kit) == ["A", "B", "B", "A"]  # a machine that warms up is fair to both
    for bundle in content["bundles"].values():
        (function,) = bundle["functions"].values()
        assert {"compile_ms", "load_ms", "load_again_ms", "predict", "peak_bytes"} <= set(function)
        assert {name: len(rows) for name, rows in bundle["probes"].items()} == {
            "text": 13, "late": 12
        }  # fmt: skip
    assert not list(kit.glob(".compiled-*"))
    assert run(kit).returncode == 0 and record(kit)["jobs"] == content["jobs"]  # nothing again
    path = kit / "measurements.json"
    path.write_text(path.read_text().replace('"finished": true', '"finished": false'))
    stopped = run(kit)
    assert stopped.returncode == 3 and "changed by hand" in stopped.stderr


def test_a_hang_is_cut_off_and_a_death_is_named(kit: Path) -> None:
    done = run(kit, "--limit", "2", env=environment(FAULTS="A/model=hang,B/model=die"))
    content = record(kit)
    assert done.returncode == 1 and content["finished"]
    assert faults(kit) == {
        "A/model/decode": "time limit", "A/probe/text": "time limit",
        "B/model/decode": "died", "B/probe/text": "died",
    }  # fmt: skip
    fault = next(f for f in content["faults"] if f["kind"] == "died")
    assert "signal 9 (SIGKILL)" in fault["detail"] and fault["phase"] == "after load again"
    (function,) = content["bundles"]["A"]["functions"].values()
    assert function["load_ms"] > 0 and "predict" not in function


def test_a_death_in_the_middle_of_an_answer_is_named(kit: Path) -> None:
    run(kit, env=environment(FAULTS="A/model=cut"))
    assert faults(kit) == {"A/model/decode": "died", "A/probe/text": "died"}
    assert record(kit)["finished"] and turns(kit) == ["B", "B"]


def test_children_are_called_as_the_script_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """runpy, by which the bridge runs the script, spells its name without the dot."""
    words = ["python", "-m", "cetane.bridge", "./measure.py", "--rounds", "1"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--rounds", "1"])
    assert command({"do": "x"}) == [sys.executable, *words[1:4], "--child", '{"do": "x"}']


def test_the_error_of_what_is_beyond_fp16_is_none() -> None:
    with np.errstate(over="ignore"):
        beyond = np.array([7e4, 1.0]).astype(np.float16)
    assert error(beyond, beyond) is None and error(np.ones(2), beyond) is None
    assert error(np.array([1.0, 2.0]), np.array([1.0, 1.0])) == pytest.approx(0.5**0.5)


def test_of_two_turns_the_median_lies_between(capsys: pytest.CaptureFixture[str]) -> None:
    """As `cetane import` has it, and Python's statistics."""
    times = [0.7, 1.8]
    content = {
        "bundles": {"A": {"name": "tiny"}}, "faults": [],
        "turns": [{"bundle": "A", "decode": {"median_ms": ms}} for ms in times],
    }  # fmt: skip
    made: Any = SimpleNamespace(
        record=SimpleNamespace(content=content), options=SimpleNamespace(output=Path("x.json"))
    )
    assert KitMeasurement.conclude(made) == 0
    assert "A (tiny): 1.25 ms a token" in capsys.readouterr().out


def test_files_that_cannot_be_read_stop_it(kit: Path) -> None:
    stopped = run(kit, "-o", ".")
    assert stopped.returncode == 3 and "cannot read" in stopped.stderr
    (kit / "kit.json").unlink()
    stopped = run(kit)
    assert stopped.returncode == 3 and "unpack the kit again" in stopped.stderr


def test_what_is_not_finite_and_what_the_compiler_refused(kit: Path) -> None:
    run(kit, env=environment(FAULTS="A/model=nan,B/model=refuse"))
    assert faults(kit)["A/model/decode"] == faults(kit)["A/probe/text"] == "not finite"
    a, b = (record(kit)["bundles"][label] for label in "AB")
    function = a["functions"]["model/decode"]
    assert function["predict"]["finite"] is False and function["predict"]["median_ms"] > 0
    assert b["functions"]["model/decode"]["refusals"] == b["refusals"]
    assert b["refusals"] == ["Error: ANECCompile() FAILED"]
    assert faults(kit)["B/model/decode"] == "error"
    assert turns(kit) == ["A", "A"]  # it is still measured, and so is nothing of B


def test_a_fault_in_a_later_turn_keeps_the_earlier_ones(kit: Path) -> None:
    run(kit, "--limit", "2", env=environment(FAULTS="B/model=hang-chain"))
    content = record(kit)
    assert content["bundles"]["B"]["functions"]["model/decode"]["predict"]["count"] > 1
    assert faults(kit) == {"B/probe/text": "time limit"} and turns(kit) == ["A", "A"]


def test_killed_in_the_middle_it_resumes(kit: Path) -> None:
    quick = ["--rounds", "2", "--steps", "3", "--energy", "0"]
    running = subprocess.Popen(
        [sys.executable, "measure.py", *quick], cwd=kit, env=environment(SLOW="0.005"),
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while not (kit / "measurements.json").exists() or (
        record(kit)["jobs"].get("B/model/decode", {}).get("state") != "running"
    ):
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    before = record(kit)
    assert before["seal"] == seal(before)  # whole, although it died
    assert run(kit).returncode == 1
    after = record(kit)
    assert [f["kind"] for f in after["faults"]] == ["interrupted"] and after["finished"]
    assert after["jobs"]["B/model/decode"] == {"state": "done", "tries": 2}
    assert after["bundles"]["A"]["functions"] == before["bundles"]["A"]["functions"]


def interruptible() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it


def test_what_the_user_stopped_is_tried_again(kit: Path) -> None:
    quick = ["--rounds", "2", "--steps", "3", "--energy", "0"]
    for stop, code in ((signal.SIGINT, 130), (signal.SIGINT, 130), (signal.SIGTERM, 143)):
        running = subprocess.Popen(
            [sys.executable, "measure.py", *quick], cwd=kit, env=environment(SLOW="0.005"),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=interruptible,
        )  # fmt: skip
        while not (kit / "measurements.json").exists() or (
            record(kit)["jobs"].get("A/model/decode", {}).get("state") != "running"
        ):
            time.sleep(0.02)
        os.kill(running.pid, stop)
        assert running.wait() == code
        assert record(kit)["jobs"] == {} and record(kit)["seal"] == seal(record(kit))
    assert run(kit).returncode == 0
    assert record(kit)["jobs"]["A/model/decode"] == {"state": "done", "tries": 1}
    assert not record(kit)["faults"]


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))


def test_a_disk_that_fills_stops_it_and_keeps_the_record(kit: Path) -> None:
    stopped = run(kit, preexec_fn=small_files)
    assert stopped.returncode == 3 and "cannot write" in stopped.stderr
    kept = record(kit)
    assert kept["seal"] == seal(kept) and not kept["finished"]
    assert not list(kit.glob(".*.tmp"))
    resumed = run(kit)
    assert record(kit)["finished"], resumed.stderr
    assert resumed.returncode in (0, 1) and turns(kit) == ["A", "B", "B", "A"]


def test_a_compiler_without_disk_stops_it_and_is_tried_again(kit: Path) -> None:
    stopped = run(kit, env=environment(FULL="1"))
    assert stopped.returncode == 3 and "free some space" in stopped.stderr
    assert faults(kit) == {"A/model/decode": "disk full"}
    assert run(kit).returncode == 1  # the fault stays in the record
    assert record(kit)["finished"] and record(kit)["jobs"]["A/model/decode"]["state"] == "done"


def test_a_changed_file_of_the_kit_is_refused_by_name(kit: Path) -> None:
    weights = next((kit / "A").rglob("weight.bin"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    stopped = run(kit)
    assert stopped.returncode == 3 and "weight.bin is not the file of this kit" in stopped.stderr


MACMON = """#!/bin/sh
while true; do
  now=$(date -u +%Y-%m-%dT%H:%M:%S.%N+00:00)
  echo "{\\"timestamp\\":\\"$now\\",\\"cpu_power\\":2.0,\\"gpu_power\\":0.5,\\"ane_power\\":1.5}"
  sleep 0.1
done
"""


@pytest.fixture
def macmon(tmp_path: Path) -> Path:
    """A folder with a macmon that says 4 W."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "macmon").write_text(MACMON)
    (folder / "macmon").chmod(0o755)
    return folder


def test_energy_is_watts_times_time_over_tokens(kit: Path, macmon: Path) -> None:
    path = f"{macmon}{os.pathsep}{os.environ['PATH']}"
    env = environment(PATH=path, SLOW_CHAIN="0.01")
    done = run(kit, "--rounds", "1", "--energy", "2.6", "--idle", "0", env=env)
    assert done.returncode == 0, done.stderr
    for energy in record(kit)["energy"]:
        each = (energy["ended"] - energy["begun"]) / energy["tokens"]
        assert energy["joules_per_token"]["processor"] == pytest.approx(4.0 * each)
        assert energy["meter"] == "macmon" and energy["caveats"]
    assert len(record(kit)["energy"]) == 2
