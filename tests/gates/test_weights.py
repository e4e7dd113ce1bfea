"""The host's tables are judged bit for bit: what their format makes of the checkpoint's rows."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.compress import parse_format
from cetane.gates.golden import golden
from cetane.gates.weights import wrong_palette, wrong_tables
from cetane.planner import Planner


@pytest.fixture(params=["fp16", "int8", "int4"])
def bundle(tiny_bundle: Callable[..., Bundle], request: pytest.FixtureRequest) -> Bundle:
    return tiny_bundle(embedding={"format": request.param}, verify=None, prefill=None)


def test_a_build_is_right(bundle: Bundle, checkpoint: Checkpoint) -> None:
    verdict = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    assert not verdict.wrong_weights
    assert [check.passed for check in verdict.checks if check.name.startswith("weights")] == [
        True, True
    ]  # fmt: skip


def test_one_bit(bundle: Bundle, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Of a code, or of a scale: no other row will do."""
    for name in sorted(bundle.manifest.files):
        if not name.startswith("embedding"):
            continue
        folder = tmp_path / name
        shutil.copytree(bundle.path, folder)
        array = np.load(folder / name)
        array.view(np.uint8).reshape(-1)[-1] ^= 16
        np.save(folder / name, array)
        changed = Bundle(folder).tables()
        problems = list(wrong_tables(Planner(checkpoint, bundle.plan.recipe), checkpoint, changed))
        assert [problem.label for problem in problems] == ["embedding tokens"]


WEIGHT = np.random.default_rng(4).normal(size=(32, 24)).astype(np.float16)


@pytest.mark.parametrize(
    ("made_as", "change", "problem"),
    [
        ("palette4-kmeans-group8", None, None),
        ("palette4-kmeans-per-tensor", None, "shapes"),
        ("palette6-kmeans-group8", None, "shapes"),
        ("palette4-kmeans-group8", np.nan, "times what they need to"),
        ("palette4-kmeans-group8", 2.0, "nearest entry"),
    ],
)
def test_palettes_without_their_sensitivities(
    made_as: str, change: float | None, problem: str | None
) -> None:
    made = parse_format(made_as).encode(WEIGHT)
    lut = made.lut if change is None else made.lut * np.float16(change)
    parts = {"indices": made.indices, "lut": lut}
    found = wrong_palette(parts, WEIGHT, parse_format("palette4-weighted-group8"))
    assert found is None if problem is None else problem in str(found)
