"""An experiment's page says what its file and the journal say."""

import html
from pathlib import Path

import pytest
from pydantic import ValidationError

from cetane.lab.entry import ExperimentReport, experiment_report
from cetane.lab.journal import ArmOutcome, Journal
from cetane.report import plots
from cetane.report.page import page


def test_a_planned_one_has_its_design(planned: ExperimentReport) -> None:
    assert planned.status == "Planned"
    assert not planned.figures and not planned.runnable
    assert planned.design
    assert planned.state == "not built"


def test_both_arms_beside_each_other(run: ExperimentReport) -> None:
    by_name = {figure.metric: figure for figure in run.figures}
    steps = by_name["decode_ms"]
    assert steps.baseline and steps.candidate
    assert (steps.baseline.value, steps.candidate.value, steps.ratio) == (4.0, 3.0, 0.75)
    assert steps.longest == 4.5  # the baseline's upper quartile
    assert by_name["kl"].ratio is None  # the baseline's is zero
    assert by_name["top1"].baseline is None
    assert by_name["predicted_ms"].candidate.kind == "predicted"  # type: ignore[union-attr]


def test_the_last_verdict_and_all_runs(run: ExperimentReport) -> None:
    assert (run.status, run.state) == ("Rejected", "interrupted")
    assert run.verdict is not None
    assert run.verdict.reason == "KL is 0.25 nats, where 0.1 is allowed."
    assert run.obituary == "Nothing was gained."
    assert [row.status for row in run.runs] == ["interrupted", "failed", "error"]
    assert [row.seconds for row in run.runs] == [None, 61.5, 2.0]
    assert run.runs[-1].error == "disk full"


def test_figures_of_an_earlier_definition_are_marked(run: ExperimentReport) -> None:
    assert run.last is not None
    for current in (True, False):
        last = run.last.model_copy(update={"current": current})
        shown = page(run.model_copy(update={"last": last}))
        assert ("figures of an earlier definition" in shown) is not current


@pytest.mark.filterwarnings("error")
def test_the_largest_curve_is_drawn() -> None:
    """matplotlib is the judge: it warns of an overflow, and fails at one in an axis."""
    lines = {"baseline": ((1e15, -1e15), (-1e15, 1e15)), "candidate": ((0.0, 5e-324),)}
    for arm, points in lines.items():
        known = ArmOutcome(curves={"e": points})
        assert "<svg" in plots.curves("e", {arm: known.curves["e"]}, "y")
    with pytest.raises(ValidationError, match="less than or equal to 1000000000000000 "):
        ArmOutcome(curves={"e": ((1e158, 0.0),)})


@pytest.mark.filterwarnings("error")
def test_texts_steer_no_terminal(run: ExperimentReport) -> None:
    """A title and a curve's name may be a stranger's."""
    hostile = "a\x1b[31m\u202e b"
    curve = run.curves[0].model_copy(update={"name": hostile})
    shown = page(run.model_copy(update={"title": hostile, "curves": (curve,)}))
    assert "\x1b" not in shown and "\u202e" not in shown
    assert shown.count("a\\x1b[31m\\u202e b") >= 4  # title, heading, picture, its label


def test_what_was_reported_stands_beside(run: ExperimentReport, planned: ExperimentReport) -> None:
    assert "predicted" in page(run)
    for report in (*run.reported, *planned.reported):
        assert report.source


def test_one_that_was_not_run_says_how(run: ExperimentReport, tmp_path: Path) -> None:
    from tests.report.conftest import experiment

    report = experiment_report(experiment(), Journal(tmp_path / "none.jsonl"))
    assert not report.figures
    assert f"cetane lab run {experiment().id}" in page(report)
    assert report.state == "not run"


def test_the_commands_name_a_lab_elsewhere(tmp_path: Path) -> None:
    from tests.report.conftest import experiment

    report = experiment_report(experiment(), Journal(tmp_path / "none.jsonl"), " --lab 'my lab'")
    told = html.unescape(page(report))
    assert f"cetane lab run {experiment().id} --lab 'my lab'<" in told
    assert "STATUS --reason REASON --lab 'my lab'<" in told


def test_every_metric_says_which_direction_is_good(run: ExperimentReport) -> None:
    ways = {figure.metric: figure.better for figure in run.figures}
    assert (ways["kl"], ways["decode_ms"], ways["top1"]) == ("lower", "lower", "higher")
    assert page(run).count("is better") == len(run.figures)
