"""A build that any fault interrupts loses nothing, and its resumption makes the same bundle."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.faults.injected import FAULTS, KILLED, Fault, changes, hit

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.pipeline.build import build
from cetane.schema.recipe import Recipe

pytestmark = pytest.mark.usefixtures("shared_templates")
SAMPLE = 4
"""Faults of a kind; `benchmarks/faults.py` tries every change."""


@pytest.fixture(scope="module")
def small(recipe: Callable[..., Recipe]) -> Recipe:
    return recipe(verify=None, prefill=None, layout={"kind": "per-block"}, context=32)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_build_resumes(
    fault: Fault, tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    def job() -> Bundle:
        return build(tiny_checkpoint, small, tmp_path / "out", lambda *_: None)

    job()  # converts what later builds share
    shutil.rmtree(tmp_path / "out")
    count = changes((tmp_path,), job)
    digest = Bundle(tmp_path / "out").digest
    draw = random.Random(fault)
    for at in sorted(draw.sample(range(1, count + 1), SAMPLE)):
        shutil.rmtree(tmp_path / "out")
        code = hit((tmp_path,), job, fault, at)
        assert code == KILLED if fault == "kill" else code in (0, 2), f"change {at} of {count}"
        resumed = job()
        resumed.verify()
        assert resumed.digest == digest, f"change {at} of {count}"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
