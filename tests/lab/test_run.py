"""Runs: what is logged, whatever happens; and a real one on the tiny model."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.lab.conftest import TINY
from tests.tasks.work import Inline

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.lab import run as runs
from cetane.lab import sides as benches
from cetane.lab import tasks
from cetane.lab.entry import Entry
from cetane.lab.experiment import ARMS, Experiment, Limit, parse_experiment
from cetane.lab.journal import ArmOutcome, Figure, Intent, Journal, value_of
from cetane.lab.library import load_experiment, load_runnable
from cetane.lab.verdict import decide
from cetane.lab.workload import Setting
from cetane.tasks.processes import Processes


def quiet(*_: Any) -> None:
    """No progress."""


def test_intent_comes_before_and_outcome_after(
    tiny: Experiment, setting: Setting, journal: Journal, monkeypatch: pytest.MonkeyPatch,
    faked: dict[str, Any],
) -> None:  # fmt: skip
    seen: list[Any] = []
    observe = runs.observe
    monkeypatch.setattr(runs, "observe", lambda *a: (seen.extend(journal.events()), observe(*a))[1])
    outcome = runs.run(tiny, setting, journal, quiet)
    (intent,) = seen
    assert isinstance(intent, Intent) and intent.run == outcome.run
    assert intent.experiment_sha256 == tiny.sha256 and set(intent.recipes) == set(ARMS)
    assert intent.command == "cetane lab run tiny" and intent.machine["cores"] == os.cpu_count()
    assert journal.events()[1:] == [outcome]
    assert outcome.status == "passed" and outcome.lesson == "Small things are small."
    assert outcome.surprise == ("expected weight_bytes to the baseline's at most 0.1, found 0.5")
    assert [gate.value for gate in outcome.gates] == [0.5, 1.2]


@pytest.mark.parametrize("value", [1.6, float("nan"), None])
def test_a_red_gate_fails(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any], value: Any
) -> None:
    faked["perplexity_ratio"] = (1.0, value)
    outcome = runs.run(tiny, setting, journal, quiet)
    assert outcome.status == "failed" and [g.passed for g in outcome.gates] == [True, False]
    assert journal.runs()["tiny"][-1].status == "failed"


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (CetaneError("no such thing", "make one"), "no such thing (make one)"),
        (ZeroDivisionError("by zero"), "ZeroDivisionError: by zero"),
        (MemoryError(), "MemoryError:"),
    ],
)
def test_what_goes_wrong_is_logged(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    failure: Exception, error: str,
) -> None:  # fmt: skip
    faked["decode_ms"] = failure
    outcome = runs.run(tiny, setting, journal, quiet)
    assert (outcome.status, outcome.error) == ("error", error)
    assert journal.events()[-1] == outcome


def test_ctrl_c_is_logged_and_goes_on(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any]
) -> None:
    faked["residency"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runs.run(tiny, setting, journal, quiet)
    assert journal.runs()["tiny"][-1].status == "interrupted"
    assert runs.settled(tiny, setting, journal.runs()["tiny"]) is None


def test_a_measure_that_is_not_there_fails(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delitem(benches.MEASURES, "speed")
    outcome = runs.run(tiny, setting, journal, quiet)
    assert outcome.status == "error" and "no function measures 'speed'" in outcome.error
    monkeypatch.setitem(benches.MEASURES, "speed", lambda _: {})
    outcome = runs.run(tiny, setting, journal, quiet)
    assert outcome.status == "error" and "no measure gave a value for predicted_ms" in outcome.error


def test_a_recipe_that_is_gone_is_an_error_of_the_run(
    lab: Path, setting: Setting, journal: Journal
) -> None:
    path = lab / "tiny.toml"
    path.write_text(path.read_text().replace("small.toml", "gone.toml"))
    outcome = runs.run(load_experiment(path), setting, journal, quiet)
    assert outcome.status == "error" and "gone.toml" in outcome.error


@pytest.mark.parametrize("context", [None, 32])
def test_a_context_that_an_answer_fills_is_told_before_a_build(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    context: int | None,
) -> None:  # fmt: skip
    """Its recipe has 64 tokens. A prompt of one needs 4 uncounted steps beside the answer."""
    assert tiny.workload is not None
    for answer, ended in (((context or 64) - 5, "passed"), ((context or 64) - 4, "error")):
        workload = tiny.workload.model_copy(update={"context": context, "new_tokens": answer})
        one = tiny.model_copy(update={"workload": workload})
        outcome = runs.run(one, setting, journal, quiet)
        assert outcome.status == ended
    assert outcome.error == (
        f"baseline: a context of {context or 64} has no room for a prompt before an answer of "
        f"{answer} tokens (give the workload fewer new_tokens, or a larger context)"
    )


def test_inputs_that_are_gone_are_errors_of_the_run(
    tiny: Experiment, setting: Setting, journal: Journal, tmp_path: Path
) -> None:
    gone = Setting(setting.folder, {"zaya-tiny": tmp_path / "gone"})
    assert tiny.workload is not None
    Path(tiny.workload.text).unlink()
    outcome = runs.run(tiny, gone, journal, quiet)
    assert outcome.status == "error" and "gone" in outcome.error
    assert journal.runs()["tiny"][0].intent.inputs == {}


def test_when_a_run_still_holds(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    assert runs.settled(tiny, setting, []) is None
    outcome = runs.run(tiny, setting, journal, quiet)
    mine = journal.runs()["tiny"]
    held = runs.settled(tiny, setting, mine)
    assert held is not None and held.outcome == outcome
    content = tiny.model_dump(mode="json")
    other = parse_experiment(content | {"metrics": ["weight_bytes", "perplexity_ratio"]}, "x")
    assert runs.settled(other, setting, mine) is None
    prose = parse_experiment(content | {"lesson": "?"}, "x")
    assert runs.settled(prose, setting, mine) is not None
    monkeypatch.setattr(runs, "versions", lambda: {"cetane": "another"})
    assert runs.settled(tiny, setting, mine) is None


def test_a_run_holds_for_its_text_and_its_model_alone(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any], tmp_path: Path
) -> None:
    runs.run(tiny, setting, journal, quiet)
    (mine,) = journal.runs()["tiny"]
    assert set(mine.intent.inputs) == {"model", "text"}
    other = tmp_path / "other"
    shutil.copytree(setting.models["zaya-tiny"], other)
    copied = Setting(setting.folder, {"zaya-tiny": other})
    assert runs.settled(tiny, copied, [mine]) is mine  # the same content, wherever it lies
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    assert runs.settled(tiny, copied, [mine]) is None
    gone = Setting(setting.folder, {"zaya-tiny": tmp_path / "gone"})
    assert runs.settled(tiny, gone, [mine]) is mine  # nobody knows of a change
    assert tiny.workload is not None
    text = Path(tiny.workload.text)
    text.write_text("Another text.")
    assert runs.settled(tiny, setting, [mine]) is None and not mine.intent.fits(tiny)
    old = replace(mine, intent=mine.intent.model_copy(update={"inputs": {}}))
    assert runs.settled(tiny, copied, [old]) is old and old.intent.fits(tiny)


def test_a_python_has_its_own_documentation(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any]
) -> None:
    assert tiny.workload is not None
    workload = tiny.workload.model_copy(update={"text": "stdlib"})
    one = tiny.model_copy(update={"workload": workload})
    runs.run(one, setting, journal, quiet)
    (mine,) = journal.runs()["tiny"]
    assert runs.settled(one, setting, [mine]) is mine
    setting.text(workload).write_text("That of another Python.")
    assert runs.settled(one, setting, [mine]) is None and mine.intent.fits(one)


def test_files_lie_where_the_experiment_says_from_any_folder(
    lab: Path, setting: Setting, journal: Journal, faked: dict[str, Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (lab / "tiny.toml").write_text(TINY.format(recipe="../small.toml", text="../text.txt"))
    monkeypatch.chdir(tmp_path)
    outcome = runs.run(load_runnable(Path("experiments/tiny.toml")), setting, journal, quiet)
    assert (outcome.status, outcome.error) == ("passed", "")
    (mine,) = journal.runs()["tiny"]
    monkeypatch.chdir(lab)
    here = load_runnable(Path("tiny.toml"))
    assert runs.settled(here, setting, [mine]) is mine
    assert Entry(here, [mine], None).state_in_words() == "passed"
    (tmp_path / "text.txt").write_text("Another text.")
    assert Entry(here, [mine], None).state_in_words() == "passed, changed since"
    (tmp_path / "small.toml").unlink()
    assert Entry(here, [mine], None).state_in_words() == "passed, a recipe cannot be read now"


def test_planned_ones_do_not_run(setting: Setting, journal: Journal) -> None:
    plan = {"id": "p", "title": "P", "status": "Planned", "date": "2026-01-01",
            "hypothesis": "h", "design": "d"}  # fmt: skip
    with pytest.raises(CetaneError, match="nothing to run"):
        runs.run(parse_experiment(plan, "p"), setting, journal, quiet)
    assert journal.events() == []


def test_values_and_ratios() -> None:
    def arms(theirs: float | None, ours: float | None) -> dict[Any, ArmOutcome]:
        return {
            "baseline": ArmOutcome(metrics={"kl": Figure(value=theirs)}),
            "candidate": ArmOutcome(metrics={"kl": Figure(value=ours)}),
        }

    assert value_of("kl", "ratio", arms(2.0, 1.0)) == 0.5
    assert value_of("kl", "ratio", arms(0.0, 1.0)) is None
    assert value_of("kl", "ratio", arms(2.0, None)) is None
    assert value_of("kl", "candidate", arms(2.0, 1.0)) == 1.0
    assert value_of("kl", "baseline", arms(2.0, 1.0)) == 2.0
    assert value_of("top1", "candidate", arms(2.0, 1.0)) is None


def test_a_real_run(tiny: Experiment, setting: Setting, journal: Journal) -> None:
    """Builds two bundles of the tiny model and takes every measure of the experiment."""
    outcome = runs.run(tiny, setting, journal, quiet)
    assert outcome.status == "passed", outcome.error
    theirs, ours = (outcome.arms[name] for name in ARMS)
    kinds = {name: f.kind for name, f in ours.metrics.items()}
    assert kinds == {
        "weight_bytes": "measured", "perplexity_ratio": "measured", "decode_ms": "measured",
        "residency": "predicted", "predicted_ms": "predicted", "same_tokens": "measured",
    }  # fmt: skip
    bundles = {Bundle(p).digest: Bundle(p) for p in (setting.folder / "bundles").iterdir()}
    assert set(bundles) == {theirs.artefact, ours.artefact}
    for arm in (theirs, ours):
        assert arm.artefact is not None
        assert arm.metrics["weight_bytes"].value == bundles[arm.artefact].plan.weight_bytes
    decode = ours.metrics["decode_ms"]
    assert decode.n == 2 and "portable" in decode.note
    assert decode.low is not None and decode.high is not None and decode.value is not None
    assert 0 < decode.low <= decode.value <= decode.high


SCRIPT = """
import os, signal, threading, time
from pathlib import Path

from cetane.cli import main


def watch():
    while not any(Path(os.environ["MADE"]).glob("*.partial/done/*.json")):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


threading.Thread(target=watch, daemon=True).start()
main()
"""
"""A command that dies when it has made the first part of a bundle in `$MADE`. It watches itself: on
a busy machine, another process may look when the bundle is whole."""


def test_a_killed_run_is_taken_up(lab: Path, setting: Setting, journal: Journal) -> None:
    """Killed while it builds: the intent stays, the parts that were made are not made again."""
    path = lab / "tiny.toml"
    content = tomllib.loads(path.read_text())
    kept = {k: content[k] for k in ("title", "status", "hypothesis")}
    lines = [f"{k} = {json.dumps(v)}" for k, v in kept.items()]
    lines += ["date = 2026-04-13", 'metrics = ["weight_bytes"]']
    for table in ("workload", "baseline"):
        lines += [f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in content[table].items())]
    lines += ["[candidate]", f"recipe = {json.dumps(content['baseline']['recipe'])}"]
    path.write_text("\n".join(lines))
    command = [
        sys.executable, "-c", SCRIPT, "lab", "run", "tiny", "--lab", str(lab), "--work",
        str(setting.folder), "--where", f"zaya-tiny={setting.models['zaya-tiny']}",
    ]  # fmt: skip
    made = setting.folder / "bundles"
    own = {"PYTHONPATH": os.pathsep.join(sys.path), "MADE": str(made)}
    killed = subprocess.run(command, env=os.environ | own, stderr=subprocess.DEVNULL, timeout=240)
    assert killed.returncode == -signal.SIGKILL
    (run,) = journal.runs()["tiny"]
    assert run.outcome is None and run.status == "interrupted"
    notes = {p: p.stat().st_mtime_ns for p in made.glob("*.partial/done/*.json")}
    outcome = runs.run(load_experiment(path), setting, journal, quiet)
    assert outcome.status == "passed", outcome.error
    assert [r.status for r in journal.runs()["tiny"]] == ["interrupted", "passed"]
    assert notes  # what had been recorded was kept by the build, as tests/test_build.py shows
    events = journal.path.read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["intent", "intent", "outcome"]


def test_verdicts(tiny: Experiment, setting: Setting, journal: Journal, faked: Any) -> None:
    with pytest.raises(CetaneError, match="never run to its end"):
        decide(tiny, [], "Measured", "0.5 of the bytes", "")
    runs.run(tiny, setting, journal, quiet)
    mine = journal.runs()["tiny"]
    with pytest.raises(CetaneError, match="reason with a number"):
        decide(tiny, mine, "Measured", "much smaller", "")
    for status in ("Shelved", "Rejected"):
        for obituary in ("", "  "):
            with pytest.raises(CetaneError, match="needs an obituary"):
                decide(tiny, mine, status, "0.5", obituary)
    assert decide(tiny, mine, "Shelved", "0.5 of the bytes", "It was.").status == "Shelved"
    assert decide(tiny, mine, "Measured", "0.5 of the bytes", "").obituary == ""
    stricter = tiny.model_copy(update={"gates": (Limit(metric="weight_bytes", most=10),)})
    with pytest.raises(CetaneError, match="as it is now, was never run") as caught:
        decide(stricter, mine, "Shipping", "0.5 of the bytes", "")
    assert caught.value.hint == "cetane lab run tiny"
    assert decide(stricter, mine, "Planned", "0.5 of the bytes", "").status == "Planned"


def test_workers_give_what_one_process_gives(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tasks, "build_arm", no_bundle)
    alone = runs.run(tiny, setting, journal, quiet)
    workers, seen = Inline(), list[tuple[str, int, int]]()
    other = tiny.model_copy(update={"id": "other"})
    together = list(
        runs.run_together([tiny, other], setting, journal, workers, lambda *s: seen.append(s))
    )
    assert [outcome.experiment for outcome in together] == ["tiny", "other"]
    for outcome in together:
        same = ("arms", "gates", "status", "surprise", "lesson", "error")
        assert all(getattr(outcome, name) == getattr(alone, name) for name in same)
    arms, taken = workers.performed[:2], workers.performed[2:]
    assert len(set(arms)) == 2  # each bundle once, for both experiments
    assert len(taken) == 12 and {name.rpartition(": ")[2] for name in taken[-2:]} == {"decode"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    events = [event.event for event in journal.events()[2:]]
    assert events == ["intent", "intent", "outcome", "outcome"]
    assert not list(setting.folder.glob("tasks-*"))


def test_a_process_of_its_own_knows_the_measures(
    tiny: Experiment, setting: Setting, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It imports what it is sent, and plans nothing."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    sizes = tiny.model_copy(update={"metrics": ("weight_bytes",), "expects": ()})
    with Processes(1) as workers:
        (outcome,) = runs.run_together([sizes], setting, journal, workers, quiet)
    assert not outcome.error
    bytes_ = [outcome.arms[arm].metrics["weight_bytes"].value for arm in ARMS]
    assert bytes_[0] and bytes_[1] and bytes_[1] < bytes_[0]


def test_an_arm_that_fails_ends_its_experiments_only(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tasks, "build_arm", no_bundle)
    broken = tiny.model_copy(
        update={"id": "broken", "workload": tiny.workload.model_copy(update={"model": "nobody's"})}
    )
    outcomes = list(runs.run_together([broken, tiny], setting, journal, Inline(), quiet))
    by_name = {outcome.experiment: outcome for outcome in outcomes}
    assert by_name["tiny"].status == "passed" and by_name["broken"].status == "error"
    assert "does not come with cetane" in by_name["broken"].error


def test_an_interruption_is_logged_for_all(
    tiny: Experiment, setting: Setting, journal: Journal, faked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(tasks, "build_arm", no_bundle)
    faked["weight_bytes"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        list(runs.run_together([tiny], setting, journal, Inline(), quiet))
    assert [run.status for run in journal.runs()["tiny"]] == ["interrupted"]


def no_bundle(job: Any, arm: str, folder: Path) -> None:
    """An arm's task that builds nothing."""
    (folder / tasks.RESULT).write_text('{"digest": ""}')
