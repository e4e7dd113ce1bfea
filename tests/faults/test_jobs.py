"""Jobs lose nothing to a fault, and resume to the same result."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.injected import KILLED, Fault, changes, hit
from tests.faults.jobs import Job, jobs, prepare

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.gates.transformers_files import read_by_transformers
from cetane.schema.recipe import Recipe

pytestmark = pytest.mark.usefixtures("shared_templates")
HITS: dict[str, tuple[Fault, ...]] = {
    "port": ("kill",), "sweep": ("full",), "lab run": ("kill", "broken"), "train-head": ("kill",),
    "add-head": ("kill", "full"),
}  # fmt: skip
"""One change each, drawn by the job's name; `benchmarks/faults.py` tries a thousand."""


@pytest.mark.parametrize("name", HITS)
def test_a_job_resumes(
    name: str,
    tmp_path: Path,
    tiny_checkpoint_folder: Path,
    tiny_bundle: Callable[..., Bundle],
    recipe: Callable[..., Recipe],
    tiny_checkpoint: Checkpoint,
    asked: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked("evidence", positions=48, most=48)  # of a port: this tests what it writes
    known = read_by_transformers(tiny_checkpoint)  # in a child, for seconds
    monkeypatch.setattr("cetane.gates.files_read.read_by_transformers", lambda _: known)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    options = {"verify": 4, "prefill": None, "layout": {"kind": "per-block"}, "context": 64}
    bundle = tiny_bundle(**options).path
    all_jobs = jobs(tiny_checkpoint_folder, recipe(**options), tmp_path / "source")
    if name == "add-head":
        prepare(tmp_path / "source", bundle)
        all_jobs["train-head"].run(tmp_path / "source")
    job = all_jobs[name]
    prepare(tmp_path / "whole", bundle)
    count = changes((tmp_path / "whole",), lambda: job.run(tmp_path / "whole"))
    wanted = job.result(tmp_path / "whole")
    draw = random.Random(name)
    for fault in HITS[name]:
        at = draw.randint(1, count)
        resumes(job, fault, at, tmp_path / "hit", bundle, wanted)


def resumes(job: Job, fault: Fault, at: int, folder: Path, bundle: Path, wanted: bytes) -> None:
    """Hit a job at a change, run it again, and compare."""
    shutil.rmtree(folder, ignore_errors=True)
    prepare(folder, bundle)
    code = hit((folder,), lambda: job.run(folder), fault, at)
    assert code in ((KILLED, 0) if fault == "kill" else (0, 2)), f"{fault} at {at}"
    job.run(folder)
    assert job.result(folder) == wanted, f"{fault} at {at}"
