"""The journal: nothing that was appended is lost, whatever happens to the last line."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from cetane.errors import CetaneError
from cetane.lab.entry import Entry
from cetane.lab.experiment import ARMS, Experiment
from cetane.lab.journal import (
    ArmOutcome,
    Figure,
    GateOutcome,
    Intent,
    Journal,
    Outcome,
    Run,
    Verdict,
    now,
)
from cetane.lab.machine import machine, versions


def intent(run: str = "r1", experiment: str = "wfa") -> Intent:
    return Intent(
        run=run,
        experiment=experiment,
        at=now(),
        experiment_sha256="e" * 64,
        command=f"cetane lab run {experiment}",
        recipes={"baseline": "a", "candidate": "b"},
        machine=machine(),
        versions=versions(),
    )


def outcome(run: str = "r1", experiment: str = "wfa", **fields: object) -> Outcome:
    arm = ArmOutcome(metrics={"kl": Figure(value=0.5, unit="nat")}, texts={"smoke": "é\n\r "})
    content = {"status": "passed", "seconds": 1.5, "arms": dict.fromkeys(ARMS, arm)} | fields
    return Outcome(run=run, experiment=experiment, at=now(), **content)  # type: ignore[arg-type]


def filled(path: Path) -> tuple[Journal, bytes]:
    journal = Journal(path)
    journal.append(intent())
    journal.append(outcome())
    journal.append(intent("r2"))
    verdict = Verdict(experiment="wfa", at=now(), status="Measured", reason="recall 0 beyond 64")
    journal.append(verdict)
    return journal, path.read_bytes()


def test_events_come_back(tmp_path: Path) -> None:
    journal, content = filled(tmp_path / "lab" / "journal.jsonl")
    assert [event.event for event in journal.events()] == [
        "intent", "outcome", "intent", "verdict",
    ]  # fmt: skip
    assert all(isinstance(json.loads(line), dict) for line in content.splitlines())
    first, second = journal.runs()["wfa"]
    assert (first.status, second.status) == ("passed", "interrupted")
    assert first.outcome is not None
    assert first.outcome.arms["candidate"].texts["smoke"] == "é\n\r "
    assert journal.verdicts()["wfa"].status == "Measured"
    assert journal.repair() == 0 and not journal.broken.exists()


FAILED = GateOutcome(metric="kl", arm="candidate", most=0.1, value=0.5, passed=False)


@pytest.mark.parametrize("change", [{"arms": {}}, {"gates": [FAILED]}, {"status": "failed"}])
def test_an_outcome_that_contradicts_itself(change: dict[str, object]) -> None:
    assert outcome(status="failed", gates=[FAILED]).status == "failed"
    with pytest.raises(ValidationError):
        outcome(**change)


def gate(value: float | None, **bounds: float) -> GateOutcome:
    passed = value is not None and value <= bounds["most"]
    return GateOutcome(metric="kl", arm="candidate", value=value, passed=passed, **bounds)


def test_a_gate_against_the_figures_of_its_arm() -> None:
    """The arms' KL is 0.5."""
    assert outcome(gates=[gate(0.5, most=1)]).gates
    for value in (0.25, 0.5000001):
        with pytest.raises(ValidationError, match=r"kl at most 1: .*, where the arms have 0\.5"):
            outcome(gates=[gate(value, most=1)])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_figure_that_json_lacks(tmp_path: Path, value: float) -> None:
    arm = ArmOutcome(metrics={"kl": Figure(value=value)})
    failed = outcome(status="failed", arms=dict.fromkeys(ARMS, arm), gates=[gate(value, most=1)])
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(failed)
    (back,) = journal.events()
    assert isinstance(back, Outcome) and back.gates[0].value is None


def test_gates_of_another_definition(tiny: Experiment) -> None:
    """A line that was changed, though its experiment's hash was not."""
    small = ArmOutcome(
        metrics={"weight_bytes": Figure(value=1.0), "perplexity_ratio": Figure(value=1.2)}
    )
    arms = {"baseline": ArmOutcome(metrics={"weight_bytes": Figure(value=2.0)}), "candidate": small}
    size = GateOutcome(metric="weight_bytes", arm="ratio", most=0.6, value=0.5, passed=True)
    text = GateOutcome(metric="perplexity_ratio", arm="candidate", most=1.5, value=1.2, passed=True)
    laxer = text.model_copy(update={"most": 99.0})
    hashes = {"experiment_sha256": tiny.sha256, "recipes": tiny.recipes_sha256}
    begun = intent(experiment="tiny").model_copy(update=hashes)
    for gates in ([], [size], [size, laxer], [size, text]):
        run = Run(begun, outcome(experiment="tiny", arms=arms, gates=gates))
        same = gates == [size, text]
        assert run.fits(tiny) == same
        assert Entry(tiny, [run], None).state_in_words() == (
            "passed" if same else "passed, changed since"
        )
    assert Run(begun, outcome(experiment="tiny", status="error", arms={})).fits(tiny)


@pytest.mark.parametrize("value", [0.5, None, float("nan")])
def test_a_gate_that_contradicts_itself(value: float | None) -> None:
    with pytest.raises(ValidationError):
        GateOutcome(metric="kl", arm="candidate", most=0.1, value=value, passed=True)


def test_an_outcome_of_another_experiment(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.append(intent())
    journal.append(outcome(experiment="another"))
    assert journal.runs()["wfa"][0].outcome is None


@pytest.mark.parametrize("name", ["journal.jsonl", "journal.jsonl.broken"])
def test_a_link_in_a_strangers_folder(tmp_path: Path, name: str) -> None:
    """`cetane lab list` set a cut line aside in the file that a link named, such as `.bashrc`; and
    cut it off from the file that the journal's link named."""
    theirs = tmp_path / "theirs"
    theirs.write_text("cut off")
    (tmp_path / "journal.jsonl").write_text("cut off")
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(theirs)
    with pytest.raises(CetaneError, match=rf"cannot write .*/{name}: it is a link"):
        Journal(tmp_path / "journal.jsonl").repair()
    assert theirs.read_text() == "cut off"


def test_a_pipe_in_a_strangers_folder(tmp_path: Path) -> None:
    """`cetane lab list` waited for a reader of it."""
    (tmp_path / "journal.jsonl").write_text("cut off")
    os.mkfifo(tmp_path / "journal.jsonl.broken")
    with pytest.raises(CetaneError, match=r"cannot write .*broken: it is no regular file"):
        Journal(tmp_path / "journal.jsonl").repair()


def test_more_lines_than_anyone_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal of 880,000 verdicts, 64 MB, took a minute and 1.2 GB."""
    monkeypatch.setattr("cetane.ledger.MOST_LINES", 2)
    journal = Journal(tmp_path / "journal.jsonl")
    for run in "ab":
        journal.append(intent(run))
    assert len(journal.events()) == 2
    journal.append(intent("c"))
    with pytest.raises(CetaneError, match=r"journal\.jsonl has more than 2 lines \(move it away"):
        journal.events()


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.events() == [] and journal.runs() == {} and journal.repair() == 0
    assert not journal.path.exists()


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """A power loss anywhere: what was complete before it is read, kept, and added to."""
    journal, content = filled(tmp_path / "journal.jsonl")
    ends = [i for i, byte in enumerate(content) if byte == ord("\n")]
    step = 7  # and every place near an end of a line, where the cases differ
    near = {end + d for end in ends for d in (-2, -1, 0, 1, 2) if end + d <= len(content)}
    for cut in sorted({*range(0, len(content) + 1, step), *near}):
        journal.path.write_bytes(content[:cut])
        journal.broken.unlink(missing_ok=True)
        whole = sum(end <= cut for end in ends)  # a line needs no line end to be whole
        assert len(journal.events()) == whole
        assert journal.path.read_bytes() == content[:cut]  # reading changes nothing
        journal.append(intent("after"))
        assert len(journal.events()) == whole + 1
        kept = content[: (ends[whole - 1] + 1) if whole else 0]
        assert journal.path.read_bytes().startswith(kept)
        lost = content[len(kept) : cut]
        assert (journal.broken.read_bytes() if lost else b"\n") == lost + b"\n"
        assert journal.broken.exists() == bool(lost)


@settings(max_examples=50)
@given(tail=st.binary(min_size=1, max_size=40).filter(lambda b: b"\n" not in b))
def test_garbage_at_the_end_is_set_aside(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    journal, content = filled(tmp_path_factory.mktemp("lab") / "journal.jsonl")
    try:
        json.loads(tail)
    except ValueError:
        pass
    else:
        return  # a number is JSON, and then it is no power loss
    journal.path.write_bytes(content + tail)
    assert journal.repair() == len(tail)
    assert journal.path.read_bytes() == content
    assert journal.broken.read_bytes() == tail + b"\n"
    assert journal.repair() == 0


@pytest.mark.parametrize("line", [b"\x00\x00\n", b'{"event": "intent"}\n', b"half of a l\n", b"\n"])
def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path, line: bytes) -> None:
    journal, content = filled(tmp_path / "journal.jsonl")
    lines = content.splitlines(keepends=True)
    bad = b"".join([*lines[:2], line, *lines[2:]])
    journal.path.write_bytes(bad)
    for touch in (journal.events, journal.repair, lambda: journal.append(intent("x"))):
        with pytest.raises(CetaneError, match=r"line 3(:| is not valid JSON:) "):
            touch()
    assert journal.path.read_bytes() == bad and not journal.broken.exists()


def test_a_last_line_of_another_schema_is_no_power_loss(tmp_path: Path) -> None:
    journal, content = filled(tmp_path / "journal.jsonl")
    journal.path.write_bytes(content + b'{"event": "prophecy"}\n')
    with pytest.raises(CetaneError, match="line 5: "):
        journal.repair()


def test_a_line_of_a_newer_version(tmp_path: Path) -> None:
    journal, content = filled(tmp_path / "journal.jsonl")
    verdict = json.loads(content.splitlines()[-1])
    journal.path.write_bytes(content + json.dumps(verdict | {"mood": 1}).encode() + b"\n")
    with pytest.raises(CetaneError) as caught:
        journal.events()
    known = "event, experiment, at, status, reason, obituary"
    assert caught.value.message.endswith(f"line 5: verdict.mood: unknown key; known: {known}")
    assert "or upgrade cetane" in str(caught.value.hint)


def test_several_losses_are_all_kept(tmp_path: Path) -> None:
    journal, content = filled(tmp_path / "journal.jsonl")
    for index in range(2):
        with journal.path.open("ab") as file:
            file.write(b'{"event": %d' % index)
        assert journal.repair()
    assert journal.path.read_bytes() == content
    assert journal.broken.read_bytes() == b'{"event": 0\n{"event": 1\n'


def test_every_event_is_synced_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "journal.jsonl", []
    monkeypatch.setattr("os.fsync", lambda handle: seen.append(path.read_bytes()))
    Journal(path).append(intent())
    assert seen[-1] == path.read_bytes() != b""


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\x00\x00\x00\x00\n", r"Expecting value: line 1 column 1 \(char 0\)"),
        (b'{"event": "\xe9"}\n', "'utf-8' codec can't decode byte 0xe9 in position 11"),
    ],
)
def test_a_journal_is_utf_8(tmp_path: Path, line: bytes, reason: str) -> None:
    """Python's json takes zeros for UTF-32."""
    journal, content = filled(tmp_path / "journal.jsonl")
    journal.path.write_bytes(line + content)
    with pytest.raises(CetaneError, match=f"journal.jsonl: line 1 is not valid JSON: {reason}"):
        journal.events()
