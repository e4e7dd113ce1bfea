"""An experiment's page says what its file and the journal say."""

from pathlib import Path

from cetane.lab.journal import Journal
from cetane.report.content import Absent, ExperimentReport
from cetane.report.experiments import experiment_report
from cetane.report.page import page


def test_a_planned_one_has_its_design(planned: ExperimentReport) -> None:
    assert planned.status == "Planned"
    assert isinstance(planned.figures, Absent)
    assert planned.remarks["Design"]
    assert planned.outcome == "not built"


def test_both_arms_beside_each_other(run: ExperimentReport) -> None:
    assert not isinstance(run.figures, Absent)
    by_name = {figure.metric: figure for figure in run.figures}
    found = by_name["decode_ms"]
    assert found.baseline and found.candidate
    assert (found.baseline.value, found.candidate.value, found.ratio) == (4.0, 3.0, 0.75)
    assert found.longest == 4.5  # the baseline's upper quartile
    assert by_name["kl"].ratio is None  # the baseline's is zero
    assert by_name["top1"].baseline is None
    assert by_name["predicted_ms"].candidate.kind == "predicted"  # type: ignore[union-attr]


def test_the_last_verdict_and_all_runs(run: ExperimentReport) -> None:
    assert (run.status, run.outcome) == ("Rejected", "interrupted")
    assert run.decided == "KL is 0.25 nats, where 0.1 is allowed."
    assert run.obituary == "Nothing was gained."
    assert [row.status for row in run.runs] == ["interrupted", "failed", "error"]
    assert [row.seconds for row in run.runs] == [None, 61.5, 2.0]
    assert run.runs[-1].error == "disk full"


def test_what_was_reported_stands_beside(run: ExperimentReport, planned: ExperimentReport) -> None:
    assert "predicted" in page(run)
    for report in (*run.reported, *planned.reported):
        assert report.source


def test_one_that_was_not_run_says_how(run: ExperimentReport, tmp_path: Path) -> None:
    from tests.report.conftest import experiment

    found = experiment_report(experiment(), Journal(tmp_path / "none.jsonl"))
    assert isinstance(found.figures, Absent)
    assert found.figures.command == f"cetane lab run {experiment().id}"
    assert found.outcome == "not run"
