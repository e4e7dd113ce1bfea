"""cetane lab: what it prints, writes and refuses."""

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.conftest import Cetane
from tests.lab import conftest as fixtures

from cetane.cli.lab import STATUSES
from cetane.files import claimed
from cetane.lab.experiment import STATUS_WORDS
from cetane.lab.journal import Journal

lab, faked = fixtures.lab, fixtures.faked


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.mil.fast.share_threads", lambda: None)


def run(cetane: Cetane, lab: Path, folder: Path, *arguments: object):
    return cetane(
        "lab", "run", *arguments, "--lab", lab, "--work", lab.parent / "work",
        "--where", f"zaya-tiny={folder}",
    )  # fmt: skip


def test_a_lab_from_new_to_report(
    cetane: Cetane,
    lab: Path,
    tiny_checkpoint_folder: Path,
    faked: dict,
    tmp_path: Path,
) -> None:
    listed = cetane("lab", "list", "--lab", lab, "--json").json["experiments"]
    assert ("tiny", "not run") in [(e["id"], e["last_run"]) for e in listed]
    assert "int8-weights" in [e["id"] for e in listed]  # which comes with cetane
    ran = run(cetane, lab, tiny_checkpoint_folder, "tiny", "--json")
    assert ran.code == 0 and ran.json["outcomes"][0]["status"] == "passed"
    assert run(cetane, lab, tiny_checkpoint_folder, "--all").out.splitlines() == [
        "not run, since the last run still holds: tiny (passed); --again runs all",
        f"next: cetane report tiny -o tiny.html --lab {lab}",
    ]
    shown = cetane("lab", "show", "tiny", "--lab", lab, "--json").json
    assert shown["last_run"] == "passed" and shown["outcome"]["gates"][0]["value"] == 0.5
    events = cetane("lab", "log", "tiny", "--lab", lab, "--json").json["events"]
    assert [e["event"] for e in events] == ["intent", "outcome"]
    decided = cetane(
        "lab", "verdict", "tiny", "shelved", "--reason", "0.5 of the bytes", "--obituary", "No.",
        "--lab", lab, "--json",
    )  # fmt: skip
    assert decided.json["verdict"]["status"] == "Shelved"
    page = tmp_path / "out" / "page.md"
    assert cetane("lab", "report", "--lab", lab, "-o", page).code == 0
    first = page.read_bytes()
    assert b"### Tiny \xe2\x80\x94 Shelved" in first
    assert b"int8-weights" not in first and b"CoreML-LLM" not in first  # cetane's, not run here
    assert cetane("lab", "report", "--lab", lab, "-o", page).code == 0
    assert page.read_bytes() == first
    assert cetane("lab", "report", "--lab", lab).code == 0
    assert (lab / "decision-log.md").read_bytes() == first
    for command in (("list",), ("show", "tiny"), ("log",)):
        told = cetane("lab", *command, "--lab", lab)
        assert told.code == 0 and "iny" in told.out


def test_a_model_of_the_user(
    cetane: Cetane, lab: Path, tiny_checkpoint_folder: Path, faked: dict
) -> None:
    """Its name is the user's, and each run says where it lies."""
    file = lab / "tiny.toml"
    file.write_text(file.read_text().replace('"zaya-tiny"', '"mine"'))
    run = ("lab", "run", "tiny", "--lab", lab, "--work", lab.parent / "work")
    nowhere = cetane(*run)
    assert nowhere.code == 1 and "--where mine=PATH" in nowhere.err
    assert cetane(*run, "--where", f"mine={tiny_checkpoint_folder}").code == 0


def test_a_second_run_is_refused_and_not_logged(
    cetane: Cetane, lab: Path, tiny_checkpoint_folder: Path, faked: dict
) -> None:
    """It would be the experiment's last run, as an error."""
    for names in (("tiny",), ("--all",), ("tiny", "--workers", 1)):
        with claimed(lab.parent / "work" / "tiny", "running tiny"):
            refused = run(cetane, lab, tiny_checkpoint_folder, *names)
        assert refused.code == 2 and "(running tiny)" in refused.err
        assert "wait until it has ended, or choose another folder with --work" in refused.err
    assert not Journal(lab / "journal.jsonl").events()
    assert run(cetane, lab, tiny_checkpoint_folder, "tiny", "tiny").code == 0


def test_all_goes_on_and_runs_only_what_has_not(
    cetane: Cetane,
    lab: Path,
    tiny_checkpoint_folder: Path,
    faked: dict,
) -> None:
    text = (lab / "tiny.toml").read_text()
    (lab / "broken.toml").write_text(text.replace("small.toml", "gone.toml"))
    first = run(cetane, lab, tiny_checkpoint_folder, "--all", "--json")
    assert first.code == 1
    assert [o["status"] for o in first.json["outcomes"]] == ["error", "passed"]
    second = run(cetane, lab, tiny_checkpoint_folder, "--all", "--json")
    runs = Journal(lab / "journal.jsonl").runs()
    assert {name: len(found) for name, found in runs.items()} == {"broken": 2, "tiny": 1}
    assert second.json["outcomes"][1] == first.json["outcomes"][1]
    run(cetane, lab, tiny_checkpoint_folder, "--all", "--again")
    assert len(Journal(lab / "journal.jsonl").runs()["tiny"]) == 2


def test_a_wrong_file_hides_no_other_experiment(cetane: Cetane, lab: Path) -> None:
    (lab / "bad.toml").write_text('title = "No status"')
    listed = cetane("lab", "list", "--lab", lab, "--json")
    assert {"tiny", "int8-weights"} < {one["id"] for one in listed.json["experiments"]}
    assert listed.code == 0 and f"not listed: {lab}/bad.toml: status: Field required" in listed.err
    assert "did you mean 'tiny'" in cetane("lab", "show", "tiy", "--lab", lab).error
    assert cetane("lab", "new", "idea", "--lab", lab).code == 0
    assert f"{lab}/bad.toml: status" in cetane("lab", "report", "--lab", lab).error


def test_a_red_gate_ends_with_1(
    cetane: Cetane,
    lab: Path,
    tiny_checkpoint_folder: Path,
    faked: dict,
) -> None:
    faked["perplexity_ratio"] = (1.0, 9.0)
    ended = run(cetane, lab, tiny_checkpoint_folder, "tiny")
    assert ended.code == 1 and "FAIL" in ended.out


def test_no_command_is_the_help(cetane: Cetane) -> None:
    shown = cetane("lab")
    assert shown.code == 0 and shown.err == ""
    assert "run      Run experiments" in shown.out


def test_new(cetane: Cetane, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    assert cetane("lab", "new", "idea", "--lab", folder).code == 0
    assert cetane("lab", "show", "idea", "--lab", folder).code == 0
    assert "exists already" in cetane("lab", "new", "idea", "--lab", folder).error
    for name in ("../up", "Capital", ""):
        refused = cetane("lab", "new", name, "--lab", folder)
        assert refused.error == f"{name!r}: no id for an experiment"
        assert "small letters" in refused.err
    assert sorted(path.name for path in tmp_path.rglob("*.toml")) == ["idea.toml"]


@pytest.mark.parametrize(
    "command", ["list", "show int8-weights", "log", "report", "new idea", "run int8-weights"]
)
def test_a_lab_that_is_none(cetane: Cetane, command: str, tmp_path: Path) -> None:
    """Commands that write make the folder that they are given."""
    file, none = tmp_path / "file", tmp_path / "none"
    file.touch()
    told = cetane("lab", *command.split(), "--lab", file)
    assert told.error == f"{file}: not a folder"
    if command.partition(" ")[0] not in ("new", "run"):
        assert cetane("lab", *command.split(), "--lab", none).error == f"{none}: no such folder"
        assert not none.exists()


def test_an_experiment_in_the_place_of_cetanes(cetane: Cetane, tmp_path: Path) -> None:
    """It has none of that one's runs and verdicts, so `new` does not hide one by accident."""
    known = cetane("lab", "show", "int8-weights", "--lab", tmp_path, "--json").json
    assert known["last_run"] == "passed" and known["verdict"] is not None
    refused = cetane("lab", "new", "int8-weights", "--lab", tmp_path)
    assert refused.error == "int8-weights is an experiment of cetane's own"
    assert cetane("lab", "new", "idea", "--lab", tmp_path).code == 0
    (tmp_path / "idea.toml").rename(tmp_path / "int8-weights.toml")
    own = cetane("lab", "show", "int8-weights", "--lab", tmp_path, "--json").json
    assert (own["last_run"], own["status"]) == ("not run", "Prototype")
    assert own["outcome"] is own["verdict"] is None


def test_figures_of_an_experiment_that_changed(
    cetane: Cetane, lab: Path, tiny_checkpoint_folder: Path, faked: dict
) -> None:
    run(cetane, lab, tiny_checkpoint_folder, "tiny")
    assert cetane("lab", "show", "tiny", "--lab", lab, "--json").json["current"]
    path = lab / "tiny.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 3"))
    assert not cetane("lab", "show", "tiny", "--lab", lab, "--json").json["current"]
    for command in (("list",), ("show", "tiny")):
        assert "passed, changed since" in cetane("lab", *command, "--lab", lab).out


def test_figures_of_an_earlier_definition(
    cetane: Cetane, lab: Path, tiny_checkpoint_folder: Path, faked: dict
) -> None:
    """A run of the new definition that ends in an error does not make them current."""
    run(cetane, lab, tiny_checkpoint_folder, "tiny")
    earlier = f"figures of an earlier definition\nnext: cetane lab run tiny --lab {lab}"
    assert earlier not in cetane("lab", "show", "tiny", "--lab", lab).out
    path = lab / "tiny.toml"
    path.write_text(path.read_text().replace("most = 0.6", "most = 0.4"))
    faked["decode_ms"] = ZeroDivisionError("by zero")
    run(cetane, lab, tiny_checkpoint_folder, "tiny")
    shown = cetane("lab", "show", "tiny", "--lab", lab, "--json").json
    assert (shown["last_run"], shown["outcome"]["status"]) == ("error", "passed")
    assert not shown["current"]
    assert earlier in cetane("lab", "show", "tiny", "--lab", lab).out
    page = lab.parent / "page.md"
    cetane("lab", "report", "--lab", lab, "-o", page)
    assert "figures of an earlier definition" in page.read_text()
    refused = cetane(
        "lab", "verdict", "tiny", "Shipping", "--reason", "0.5 of the bytes", "--lab", lab
    )
    assert refused.error == "tiny, as it is now, was never run to its end"
    assert "cetane lab run tiny" in refused.err


def test_all_runs_anew_what_read_another_text_or_model(
    cetane: Cetane, lab: Path, tiny_checkpoint_folder: Path, faked: dict
) -> None:
    run(cetane, lab, tiny_checkpoint_folder, "--all")
    (lab.parent / "text.txt").write_text("Another text, of other words. " * 8)
    for command in (("list",), ("show", "tiny")):
        assert "passed, changed since" in cetane("lab", *command, "--lab", lab).out
    other = lab.parent / "other"
    shutil.copytree(tiny_checkpoint_folder, other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    for model, count in ((tiny_checkpoint_folder, 2), (other, 3), (other, 3)):
        run(cetane, lab, model, "--all")
        assert len(Journal(lab / "journal.jsonl").runs()["tiny"]) == count


def test_commands_that_are_advised_find_the_lab(cetane: Cetane, tmp_path: Path) -> None:
    folder = tmp_path / "my lab"
    assert cetane("lab", "new", "idea", "--lab", folder).code == 0
    here = f"--lab '{folder}'"
    assert cetane("lab", "list", "--lab", folder).out.endswith(f"next: cetane lab show ID {here}\n")
    none = cetane("lab", "log", "--lab", folder).out
    assert none == f"nothing was run here yet: cetane lab run ID {here}\n"
    decide = ("lab", "verdict", "idea", "Measured", "--lab", folder, "--reason")
    assert f"cetane lab show idea {here} has some" in cetane(*decide, "better").err
    assert f"cetane lab run idea {here}" in cetane(*decide, "2 % better").err
    assert f"cetane lab list {here} has the ids" in cetane("lab", "run", "--lab", folder).err


def test_a_cut_journal_is_told_of(
    cetane: Cetane,
    lab: Path,
    tiny_checkpoint_folder: Path,
    faked: dict,
) -> None:
    run(cetane, lab, tiny_checkpoint_folder, "tiny")
    path = lab / "journal.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event": "out')
    told = cetane("lab", "log", "--lab", lab, "--json")
    assert len(told.json["events"]) == 2 and "cut off" in told.err
    assert path.read_bytes() == whole
    path.write_bytes(b"nonsense\n" + whole)
    assert "line 1 is not valid JSON: " in cetane("lab", "log", "--lab", lab).error


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("run",), "give ids of experiments, or only --all"),
        (("run", "tiny", "--all"), "give ids of experiments, or only --all"),
        (("run", "tny"), "did you mean 'tiny'"),
        (("show", "nothing"), "no experiment 'nothing'"),
        (("log", "nothing"), "no experiment 'nothing'"),
        (("list", "--status", "done"), "no status 'done'"),
        (("list", "--status", "reject"), "no status 'reject'; did you mean 'Rejected'?"),
        (("run", "tiny", "--where", "x"), "not NAME=PATH"),
        (("run", "tiny", "--where", "x=a", "--where", "x=b"), "named twice"),
        (("run", "tiny", "--where", "zaya-tinny=a"), "no workload of these experiments has that"),
        (("verdict", "tiny", "Measured", "--reason", "better"), "reason with a number"),
        (("verdict", "tiny", "Rejected", "--reason", "2 % worse"), "needs an obituary"),
        (("verdict", "tiny", "Measured", "--reason", "2 % better"), "never run to its end"),
        (("verdict", "tiny", "Great", "--reason", "2"), "no status 'Great'"),
    ],
)
def test_what_is_refused(cetane: Cetane, lab: Path, arguments: tuple, error: str) -> None:
    assert error in cetane("lab", *arguments, "--lab", lab).error
    assert not (lab / "journal.jsonl").exists()


def test_json_is_of_the_shape_that_is_documented(
    cetane: Cetane,
    lab: Path,
    tiny_checkpoint_folder: Path,
    faked: dict,
) -> None:
    run(cetane, lab, tiny_checkpoint_folder, "tiny")
    intent, outcome = map(json.loads, (lab / "journal.jsonl").read_text().splitlines())
    assert {"run", "experiment", "at", "experiment_sha256", "command", "recipes", "machine",
            "versions", "inputs"} <= set(intent)  # fmt: skip
    assert {"status", "seconds", "arms", "gates", "surprise", "lesson", "next", "error"} < set(
        outcome
    )
    figure = outcome["arms"]["candidate"]["metrics"]["weight_bytes"]
    assert set(figure) == {"value", "low", "high", "unit", "kind", "n", "note"}


def test_the_help_names_every_status() -> None:
    assert ", ".join(STATUS_WORDS) == STATUSES
