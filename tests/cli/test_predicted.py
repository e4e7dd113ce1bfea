"""`cetane plan --chip`: predicted numbers, called so, with their sources."""

import shlex
from pathlib import Path

import pytest

from cetane.cli.forecast import break_even
from cetane.gates.residency.target import Target
from cetane.perf.breakeven import DraftingTimes
from cetane.pipeline.chip_layout import recipe_for_chip
from cetane.pipeline.request import make_request
from cetane.planner import Planner

from .conftest import Cetane


def test_without_a_chip_there_is_a_hint(
    cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path
) -> None:
    shown = cetane("plan", tiny_checkpoint_folder, "-r", recipe_file)
    assert shown.code == 0 and "--chip m4-max" in shown.out and "tok/s" not in shown.out
    assert (
        "predicted" not in cetane("plan", tiny_checkpoint_folder, "-r", recipe_file, "--json").json
    )


def test_predicted(cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path) -> None:
    arguments = ("plan", tiny_checkpoint_folder, "-r", recipe_file, "--chip", "m4-max")
    found = cetane(*arguments, "--json").json["predicted"]
    assert found["chip"] == "m4-max"
    assert {m["mode"]: m["tokens"] for m in found["modes"]} == {
        "decode": 1, "verify": 3, "prefill": 8,
    }  # fmt: skip
    for mode in found["modes"]:
        assert mode["ms"] == pytest.approx(sum(mode["terms_ms"].values()))
        assert mode["tok_s"] == pytest.approx(1000 * mode["tokens"] / mode["ms"])
        assert mode["low"] < mode["ms"] < mode["high"]
        assert mode["binds"] == max(mode["terms_ms"], key=mode["terms_ms"].get)
    decode, verify = found["modes"][:2]
    assert found["speculation"]["slowdown"] == pytest.approx(verify["ms"] / decode["ms"])
    assert all(rate["source"] and rate["kind"] for rate in found["rates"].values())
    shown = cetane(*arguments).out
    assert "predicted on M4 Max" in shown and "--explain" in shown
    assert "a prefill call has no head" in " ".join(shown.split())


@pytest.mark.parametrize(("tv", "percent"), [(0.9, 1), (1.004, 1), (1.05, 2), (3.0, 67)])
def test_the_acceptance_that_pays_is_never_nothing(tv: float, percent: int) -> None:
    """Of 3 drafted tokens, (tv - 1) / 3 must be accepted."""
    assert f"if {percent}% of drafted" in break_even(DraftingTimes(t1=1.0, tv=tv, width=4))


def test_explain(cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path) -> None:
    arguments = ("plan", tiny_checkpoint_folder, "-r", recipe_file, "--explain")
    shown = cetane(*arguments, "--chip", "m1").out
    assert "borrowed from" in shown and "anemll" in shown.lower()
    assert "2015.8 MB" in shown and "100 programs" in shown and "16384 elements" in shown
    assert "notch" not in shown
    assert "unknown" in shown  # no interval: nothing of an M1 was fitted
    assert cetane(*arguments).error.startswith("--sweep, --explain and --os need a chip")


def test_sweep(cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path) -> None:
    arguments = ("plan", tiny_checkpoint_folder, "-r", recipe_file, "--chip", "a19-pro", "--sweep")
    found = cetane(*arguments, "--json").json["predicted"]
    held = [c for c in found["combinations"] if c["refused"] is None]
    speeds = [c["decode"]["ms"] for c in held]
    assert speeds == sorted(speeds) and len(held) > 20
    assert found["fastest"] is None  # so small a model is not on the ANE in any layout
    shown = cetane(*arguments).out
    assert "predicted on A19 Pro" in shown
    assert "nothing that is known to pass every gate fits at a context of 64" in shown


def test_an_older_system(cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path) -> None:
    """It loads no program of this recipe, which is for iOS 18."""
    plan = ("plan", tiny_checkpoint_folder, "-r", recipe_file)
    arguments = (*plan, "--chip", "a19-pro", "--sweep", "--os", "17", "--json")
    refused = [c["refused"] or "" for c in cetane(*arguments).json["predicted"]["combinations"]]
    assert any("newer-system" in reason for reason in refused)
    assert "need a chip" in cetane(*plan, "--os", "18").error


def test_a_plan_for_a_system_that_does_not_load_it(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path
) -> None:
    """The next step is a plan for one that does; its own next step is a port."""
    plan = ("plan", tiny_checkpoint_folder, "-r", small_file, "--chip", "a13")
    shown = cetane(*plan, "--os", 17)
    *_, last = shown.out.splitlines()
    assert last.startswith("next: cetane plan ") and last.endswith("--chip a13 --os 18")
    assert "newer-system" in shown.err and "a port stops there" not in shown.err
    _, *following = shlex.split(last.removeprefix("next: "))
    *_, last = cetane(*following).out.splitlines()
    assert last.startswith("next: cetane port ") and "--chip a13 --os 18" in last


def test_an_unknown_chip(cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path) -> None:
    plan = ("plan", tiny_checkpoint_folder, "-r", recipe_file)
    assert "known: m1" in cetane(*plan, "--chip", "m9").error


@pytest.mark.parametrize("command", ["plan", "port", "sweep"])
def test_a_chip_without_a_name_is_no_default(
    cetane: Cetane, tiny_checkpoint_folder: Path, command: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A shell makes it of a variable that is not set."""
    monkeypatch.chdir(tmp_path)
    asked = cetane(command, tiny_checkpoint_folder, "--chip", "")
    assert asked.error.startswith("no chip ''; known: m1")


def test_a_chip_without_figures_has_no_number(
    cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path
) -> None:
    plan = ("plan", tiny_checkpoint_folder, "-r", recipe_file, "--chip", "a13")
    shown = cetane(*plan)
    assert "no rate at which A13 reads weights was measured" in shown.out
    assert "tok/s" not in shown.out
    assert cetane(*plan, "--json").json["predicted"]["modes"] == []
    assert "no speed is predicted" in cetane(*plan, "--sweep").error
    assert "a port stops there without --no-require-residency\n" in shown.err + "\n"


def test_the_memory_of_a_phone(
    cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    plan = ("plan", tiny_checkpoint_folder, "-r", recipe_file, "--chip")
    assert "no iPhone with an A13 has more than 4 GB" in " ".join(cetane(*plan, "a13").out.split())
    assert "of weights and caches" not in cetane(*plan, "m1").out
    monkeypatch.setattr("cetane.pipeline.plan.Forecast.held", 6_034_600_000)
    warned = "6.0 GB of weights and caches are more than the 4 GB of every iPhone with an A13"
    assert f"warning: {warned}" in cetane(*plan, "a13").err


def test_a_plan_off_the_ane_says_so(
    cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path
) -> None:
    """A plan builds nothing, so what port would refuse is a warning."""
    plan = ("plan", tiny_checkpoint_folder, "-r", recipe_file)
    plan = (*plan, "--set", "compression.default=int4-per-block32")
    shown = cetane(*plan, "--chip", "m4-max")
    assert shown.code == 0 and "predicted on M4 Max" in shown.out
    assert "residency, predicted for m4-max, OS 26: FAIL\n" in shown.err
    assert shown.err.count("silent: int4-per-block") == 1
    assert 'default = "palette4-kmeans-group32"' in shown.err
    assert "speeds are those of the ANE alone" in shown.err
    found = cetane(*plan, "--chip", "m4-max", "--json").json["residency"]
    assert found["passed"] is False and "int4-per-block" in found["reasons"][0]
    assert found["explanation"]["changes"] == {"compression.default": "palette4-kmeans-group32"}
    assert "residency" not in cetane(*plan, "--json").json


def test_a_plan_names_its_risks(
    cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path
) -> None:
    plan = ("plan", tiny_checkpoint_folder, "-r", recipe_file, "--chip", "m4-max")
    found = cetane(*plan, "--json").json["residency"]["findings"]
    risks = [rule for rule, severity in found.items() if severity == "risk"]
    assert risks
    shown = " ".join(cetane(*plan).out.split())
    assert f"risk, predicted: {', '.join(risks)}; see cetane audit --explain RULE" in shown


def test_what_follows_a_plan_off_the_ane_ports_it(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path, tmp_path: Path
) -> None:
    plan = ("plan", tiny_checkpoint_folder, "-r", small_file, "--chip", "a19-pro", "--os", 26)
    *_, last = cetane(*plan).out.splitlines()
    assert last.endswith("--chip a19-pro --os 26 --no-require-residency")
    _, *port = shlex.split(last.removeprefix("next: "))
    assert cetane(*port, "-o", tmp_path / "bundle").code == 0


def test_the_plan_for_a_chip_is_what_a_port_begins_with(
    cetane: Cetane, tiny_checkpoint_folder: Path
) -> None:
    found = cetane("plan", tiny_checkpoint_folder, "--chip", "a19-pro", "--json").json
    request = make_request(tiny_checkpoint_folder)
    fitted = recipe_for_chip(request.planner, Target("a19-pro"), request.named)
    plan = Planner(request.checkpoint, fitted).plan()
    assert len(plan.shards) < len(request.planner.plan().shards)
    assert [shard["name"] for shard in found["shards"]] == [shard.name for shard in plan.shards]
    assert found["recipe"]["head"]["slices"] == fitted.head.slices == 1
    assert found["warnings"] == []
