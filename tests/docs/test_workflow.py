"""The workflow for a hosted Mac: it was never run, so what can be checked here is checked."""

from pathlib import Path
from typing import Any

import pytest
import yaml

FILE = Path(__file__).parents[2] / ".github" / "workflows" / "mac.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return content


def test_it_says_that_it_was_not_run(workflow: dict[str, Any]) -> None:
    assert "not run yet" in workflow["name"] and FILE.read_text().startswith("# Not run yet")


def test_everything_has_a_time_limit(workflow: dict[str, Any]) -> None:
    for job in workflow["jobs"].values():
        limits = [step["timeout-minutes"] for step in job["steps"]]
        assert max(limits) <= job["timeout-minutes"] <= 45


def test_the_mac_computes_on_the_cpu_alone(workflow: dict[str, Any]) -> None:
    """It has no Neural Engine, and an attempt to compile for one can hang."""
    job = workflow["jobs"]["measure"]
    assert job["runs-on"].startswith("macos")
    (command,) = [s["run"] for s in job["steps"] if "measure.py" in s.get("run", "")]
    for option in ("--compute-units CPU_ONLY", "--no-plan", "--energy 0", "--limit"):
        assert option in command
