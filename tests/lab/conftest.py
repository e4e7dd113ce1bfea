"""A lab of one experiment on the tiny model, which takes the place of a real one."""

from pathlib import Path
from typing import Any

import pytest

from cetane.lab import sides as benches
from cetane.lab.experiment import ARMS, Experiment
from cetane.lab.journal import Journal
from cetane.lab.library import load_runnable
from cetane.lab.sides import Findings, Sides, figure
from cetane.lab.workload import Setting

SMALL = """
[layout]
kind = "single"
[cache]
context = 64
[tokens]
verify = 0
prefill = 0
"""
TINY = """
title = "Tiny"
status = "Measured"
date = 2026-04-13
hypothesis = "int8 is half of fp16."
lesson = "Small things are small."
metrics = [
    "weight_bytes", "perplexity_ratio", "decode_ms", "residency", "predicted_ms", "same_tokens",
]

[workload]
model = "zaya-tiny"
text = "{text}"
tokens = 40
new_tokens = 4
rounds = 2

[baseline]
recipe = "{recipe}"

[candidate]
recipe = "{recipe}"
[candidate.changes.compression]
default = "int8-per-channel"

[[expects]]
metric = "weight_bytes"
of = "ratio"
most = 0.1

[[gates]]
metric = "weight_bytes"
of = "ratio"
most = 0.6

[[gates]]
metric = "perplexity_ratio"
most = 1.5

[[reported]]
what = "size"
candidate = "half"
source = "nobody"
"""


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with the experiment `tiny`."""
    folder = tmp_path / "experiments"
    folder.mkdir()
    recipe, text = tmp_path / "small.toml", tmp_path / "text.txt"
    recipe.write_text(SMALL)
    text.write_text("The cetane number of a fuel is how readily it ignites. " * 4)
    (folder / "tiny.toml").write_text(TINY.format(recipe=recipe, text=text))
    return folder


@pytest.fixture
def tiny(lab: Path) -> Experiment:
    return load_runnable(lab / "tiny.toml")


@pytest.fixture
def journal(lab: Path) -> Journal:
    return Journal(lab / "journal.jsonl")


@pytest.fixture
def setting(tmp_path: Path, tiny_checkpoint_folder: Path) -> Setting:
    return Setting(tmp_path / "work", {"zaya-tiny": tiny_checkpoint_folder})


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Measures that cost nothing: every metric of the tiny experiment by arm, to be changed."""
    import cetane.lab.measures  # noqa: F401

    values: dict[str, Any] = {
        "weight_bytes": (100.0, 50.0), "perplexity_ratio": (1.0, 1.2), "decode_ms": (2.0, 1.0),
        "residency": (1.0, 1.0), "predicted_ms": (4.0, 3.0), "same_tokens": (1.0, 0.5),
    }  # fmt: skip

    def measure(names: tuple[str, ...]) -> Any:
        def found(_: Sides) -> dict[Any, Findings]:
            for name in names:
                if isinstance(values[name], BaseException):
                    raise values[name]
            return {
                arm: Findings({n: figure(n, values[n][i]) for n in names})
                for i, arm in enumerate(ARMS)
            }

        return found

    kinds = {"size": ("weight_bytes",), "quality": ("perplexity_ratio",), "decode": ("decode_ms",),
             "residency": ("residency",), "speed": ("predicted_ms",),
             "agreement": ("same_tokens",)}  # fmt: skip
    for name, metrics in kinds.items():
        monkeypatch.setitem(benches.MEASURES, name, measure(metrics))
    return values


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker owns its process, a test does not."""
    monkeypatch.setattr("cetane.lab.tasks.share_threads", lambda: None)
