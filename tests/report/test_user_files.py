"""Files beside a bundle: read, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import point

from cetane.errors import CetaneError
from cetane.report import plots, user_files
from cetane.report.user_files import read_benchmark, read_sweep

START = b'{"bundle": "b", "draft_tokens": 1, "seconds": {}, "passed": true, "judged_by": "clock",'


def test_a_benchmark(bench_file: Path, tmp_path: Path) -> None:
    bench = read_benchmark(bench_file, tmp_path)
    assert bench.calls == {1: 11.2, 4: pytest.approx(15.7)}
    assert not bench.ours
    assert (bench.passed, bench.judged_by) == (False, "clock")  # 0.96 is too slow
    assert bench.longest == 2.5  # the largest ratio is 2.31
    assert bench.ticks == (0.5, 1.0, 1.5, 2.0)
    assert [row.ratio for row in bench.rows] == [0.96, 2.31, 1]


@pytest.mark.parametrize("figure", ["plain", "speculative", "ratio"])
def test_a_category_without_a_speed_has_no_row(
    figure: str, bench_file: Path, tmp_path: Path
) -> None:
    content = json.loads(bench_file.read_text())
    content["speeds"][0][figure] = None
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    assert [row.ratio for row in read_benchmark(path, tmp_path).rows] == [2.31, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "not a benchmark"),
        (b'{"speeds": []}', "not a benchmark"),
        (START + b' "speeds": []}', "has no figures"),
        (START + b' "speeds": [{"ratio": "x"}]}', "speeds.0"),
    ],
)  # fmt: skip
def test_no_benchmark(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bench.json"
    path.write_bytes(content)
    with pytest.raises(CetaneError, match=said) as caught:
        read_benchmark(path, tmp_path)
    assert "cetane bench" in str(caught.value.hint)


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), 1e300])
def test_ratios_that_no_axis_holds(tmp_path: Path, bench_file: Path, ratio: float) -> None:
    content = json.loads(bench_file.read_text())
    content["speeds"][0]["ratio"] = ratio
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(content))
    with pytest.raises(CetaneError, match="ratio"):
        read_benchmark(path, tmp_path)


def test_files_that_are_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_files, "LARGEST", 100)
    path = tmp_path / "large"
    path.write_bytes(b" " * 101)
    with pytest.raises(CetaneError, match="larger than the 100 bytes"):
        read_benchmark(path, tmp_path)
    with pytest.raises(CetaneError, match="too large"):
        read_sweep(path, "one")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="cannot read"):
        read_benchmark(tmp_path / "none", tmp_path)
    with pytest.raises(CetaneError, match="cannot read"):
        read_benchmark(tmp_path, tmp_path)
    with pytest.raises(CetaneError, match="no such file"):
        read_sweep(tmp_path / "none", "one")


def test_points_that_can_be_compared(sweep_file: Path) -> None:
    """Those of the last text; the format that another beats at equal bytes is not on the line."""
    sweep = read_sweep(sweep_file, "none of these")
    assert {p.name: p.best for p in sweep.points} == {
        "fp16": True,
        "palette4-kmeans-group32": True,
        "palette4-uniform": False,
        "palette2-kmeans-group32": True,
    }
    assert (sweep.text, sweep.tokens) == ("text", 512)
    assert {p.cosine for p in sweep.points} == {0.97}
    assert read_sweep(sweep_file.parent, "none of these") == sweep  # its folder will do


def test_this_models_points_come_first(tmp_path: Path) -> None:
    points = [
        point("mine", "kmeans", 4, 0.1),
        point("theirs", "kmeans", 4, 0.2, model={"source": "m", "fingerprint": "two"}),
    ]
    path = tmp_path / "sweep.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in points))
    assert [p.name for p in read_sweep(path, "one").points] == ["mine"]
    assert [p.name for p in read_sweep(path, "three").points] == ["theirs"]


def test_weights_that_were_replaced_under_the_old_date_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    models = [{"source": "m", "fingerprint": "one", "content": c} for c in ("old", "new")]
    lines = [point(str(m["content"]), "kmeans", 4, 0.1, model=m) for m in models]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [p.name for p in read_sweep(path, "one").points] == ["new"]


@pytest.mark.parametrize("content", ["", "\n", '{"version": 2}\n', "[]\n"])
def test_no_sweep(tmp_path: Path, content: str) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(content)
    with pytest.raises(CetaneError):
        read_sweep(path, "one")


@pytest.mark.parametrize(
    "change",
    [
        {"kl": float("nan")},
        {"kl": 1e250},
        {"bits_per_weight": float("inf")},
        {"bits_per_weight": -1e158},
        {"perplexity_ratio": float("inf")},
    ],
)
def test_points_that_no_axis_holds(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "sweep.jsonl"
    path.write_text(json.dumps(point("mine", "kmeans", 4, 0.1) | change) + "\n")
    with pytest.raises(CetaneError, match=next(iter(change))):
        read_sweep(path, "one")


@pytest.mark.filterwarnings("error")
def test_the_largest_points_are_drawn(tmp_path: Path) -> None:
    """matplotlib is the judge: it warns of an overflow, and fails at one in an axis."""
    path = tmp_path / "sweep.jsonl"
    points = [
        point(
            "large",
            "kmeans",
            4,
            1e15,
            bits_per_weight=1e15,
            perplexity=1e15,
            perplexity_ratio=1e300,
        ),
        point("small", "kmeans", 4, 5e-324, bits_per_weight=-1e15),
    ]
    path.write_text("".join(json.dumps(p) + "\n" for p in points))
    assert "<svg" in plots.quality(read_sweep(path, "one"))
