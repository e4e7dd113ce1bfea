"""The lines a sweep leaves behind, whole and cut off."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from cetane.errors import CetaneError
from cetane.sweeps.points import (
    JudgedText,
    KeyedLedger,
    LayerScore,
    Point,
    open_ledger,
    read_points,
)
from cetane.validation import Data


def score(number: int, kl: float = 0.5) -> LayerScore:
    return LayerScore(key=f"{number}", layer=number, kind="mlp", format="int8-per-channel", kl=kl)


def test_what_was_appended_is_known_again(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    lines = KeyedLedger(path, LayerScore)
    for number in range(3):
        lines.append(score(number))
    lines.append(score(1, kl=0.25))
    again = KeyedLedger(path, LayerScore)
    assert again.get("0") == score(0)
    assert again.get("1") == score(1, kl=0.25)  # the last one counts
    assert again.get("4") is None
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == list("0121")


@pytest.mark.parametrize("cut", range(1, 70, 8))
def test_a_line_that_was_cut_off_is_dropped_and_no_other(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "layers.jsonl"
    lines = KeyedLedger(path, LayerScore)
    lines.append(score(0))
    whole = path.read_bytes()
    lines.append(score(1))
    path.write_bytes(path.read_bytes()[:-cut])
    again = KeyedLedger(path, LayerScore)
    assert again.get("0") == score(0)
    complete = cut == 1  # only the line's end is lost
    assert again.get("1") == (score(1) if complete else None)
    assert path.read_bytes().startswith(whole)  # reading changes nothing
    again.append(score(2))
    kept = ["0", "1", "2"] if complete else ["0", "2"]
    assert [s.key for s in open_ledger(path, LayerScore).read()] == kept


@pytest.mark.parametrize(
    "line",
    [
        b"no json",
        b"[]",
        b'{"key": "1"}',
        b'{"key": "1", "layer": 0, "kind": "mlp", "format": "fp16", "kl": "much"}',
        b'{"key": "1", "layer": 0, "kind": "mlp", "format": "fp16", "kl": 1, "more": 2}',
        b"\xff\xfe",
    ],
)
def test_a_whole_line_of_something_else_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "layers.jsonl"
    KeyedLedger(path, LayerScore).append(score(0))
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(CetaneError, match="line 2"):
        KeyedLedger(path, LayerScore)


def test_an_unknown_key_is_named_with_the_known_ones(tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    line = {"key": "1", "layer": 0, "kind": "mlp", "format": "fp16", "kl": 1, "forma": 2}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(CetaneError, match=r"forma: unknown key; did you mean 'format'\? known: "):
        KeyedLedger(path, LayerScore)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Point, {"name": "x" * 256}),
        (Point, {"perplexity": 1e300}),
        (JudgedText, {"name": "x" * 10**6}),
    ],
)
def test_what_no_plot_can_show(kind: type[Data], change: dict[str, object]) -> None:
    """A text's name of a million characters took 105 s and 1 GB to draw."""
    (key,) = change
    with pytest.raises(ValidationError) as error:
        kind.model_validate(change)
    assert key in {one["loc"][0] for one in error.value.errors() if one["type"] != "missing"}


def test_points_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="no such file"):
        read_points(tmp_path / "sweep.jsonl")
    with pytest.raises(CetaneError, match="no such file"):
        read_points(tmp_path)
    (tmp_path / "sweep.jsonl").touch()
    assert read_points(tmp_path / "sweep.jsonl") == []
