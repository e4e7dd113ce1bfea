"""Which torch `make` installs."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = shutil.which("make")


@pytest.mark.skipif(MAKE is None, reason="no make")
@pytest.mark.parametrize(
    ("system", "gpu", "cpu_build"),
    [("Linux", False, True), ("Linux", True, False), ("Darwin", False, False)],
)
def test_linux_without_a_gpu_gets_no_cuda(
    tmp_path: Path, system: str, gpu: bool, cpu_build: bool
) -> None:
    """A Mac's only build of torch is on PyPI, and has no CUDA."""
    for name, says in [("uname", system)] + [("nvidia-smi", "")] * gpu:
        (tmp_path / name).write_text(f"#!/bin/sh\necho {says}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    assert MAKE is not None
    steps = subprocess.run(
        [MAKE, "--dry-run", "--always-make", ".venv/installed"],
        cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    (torch,) = (i for i, step in enumerate(steps) if " torch==" in step)
    (cetane,) = (i for i, step in enumerate(steps) if "--editable" in step)
    assert torch < cetane  # else cetane's requirements bring PyPI's build
    assert steps[torch].endswith("https://download.pytorch.org/whl/cpu") == cpu_build
