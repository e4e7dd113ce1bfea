"""cetane heads: a file of scores from a tiny model, and what is said of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import build_model, build_tokenizer

from cetane.cli.heads import show
from cetane.pipeline import heads as pipeline
from cetane.pipeline.heads import HeadsResult, JudgedShare
from cetane.schema.recipe import load_recipe
from cetane.schema.streaming import HeadScores, Streaming

from .conftest import Cetane

RECIPE = """
[layout]
kind = "single"
[cache]
context = 512
[tokens]
verify = 0
prefill = 16
[compression]
default = "fp16"
"""
SMALL = ("--tokens", 720, "--texts", 1, "--steps", 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model beside a recipe."""
    build_model(max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "plain.toml").write_text(RECIPE)
    return tmp_path


def scores_of(rows: list[list[float]]) -> HeadScores:
    return HeadScores.model_validate(
        {"source": "a", "model_type": "llama", "method": "mass", "settings": {}, "layers": rows}
    )


def result_of(found: list[int], rows: list[list[float]], asked: int = 20) -> HeadsResult:
    """A judgement of four shares that found so many keys."""
    scores = scores_of(rows)
    judged = [
        JudgedShare(share, int(2e7 + share * 8e7), count, asked)
        for share, count in zip(pipeline.SHARES, found, strict=True)
    ]
    return HeadsResult(scores, 8192, judged, 1024, Streaming(scores=scores))


def shown(result: HeadsResult, capsys: pytest.CaptureFixture[str]) -> list[str]:
    capsys.readouterr()
    show(result)
    return capsys.readouterr().out.splitlines()


def test_from_a_model_to_a_plan(cetane: Cetane, folder: Path) -> None:
    """The file that the command names is one that a recipe beside it reads."""
    model, recipe, output = folder / "model", folder / "plain.toml", folder / "found.json"
    result = cetane("heads", model, "-r", recipe, "-o", output, *SMALL)
    assert result.code == 0
    assert all(len(line) <= 80 for line in result.out.splitlines() if str(folder) not in line)
    assert result.out.splitlines()[-5:] == [
        "the model finds no key with all its heads: try fewer --tokens, or fewer --keys",
        f"wrote {output}",
        "next, in a recipe beside it:",
        "  [cache.streaming]",
        '  scores = "found.json"',
    ]
    scores = HeadScores.model_validate_json(output.read_text())
    (folder / "long.toml").write_text(
        RECIPE + '[cache.streaming]\nscores = "found.json"\nwindow = 32\nsinks = 4\n'
    )
    streaming = load_recipe(str(folder / "long.toml")).cache.streaming
    assert streaming is not None and streaming.scores == scores
    planned = cetane("plan", model, "-r", folder / "long.toml")
    assert planned.code == 0
    assert all(len(line) <= 80 for line in planned.out.splitlines() if str(folder) not in line)
    assert (
        "2 of 4 key/value heads keep all tokens, the others 4 sinks and a window of 32"
        in planned.out
    )
    again = cetane("heads", model, "-r", folder / "long.toml", "-o", output, *SMALL)
    assert again.error == "recipe long: its heads stream already"


def test_json(cetane: Cetane, folder: Path) -> None:
    """One document, with the scores that the file has; --context replaces the recipe's."""
    output = folder / "heads.json"
    found: Any = cetane(
        "heads", folder / "model", "-r", folder / "plain.toml", "-o", output, *SMALL,
        "--texts", 14, "--context", 1024, "--json",
    ).json  # fmt: skip
    assert set(found) == {"scores", "context", "tokens", "judged"}
    assert found["scores"] == json.loads(output.read_text())
    assert (found["context"], found["tokens"]) == (1024, 720)
    assert [one["full"] for one in found["judged"]] == list(pipeline.SHARES)
    assert {one["asked"] for one in found["judged"]} == {14}  # so many keys fit in no text
    a_head = 2 * 2 * 16  # keys and values of 16 channels in fp16
    short = 320  # 64 sinks and a window of 256
    assert [one["cache_bytes"] for one in found["judged"]] == [
        a_head * (full * 1024 + (4 - full) * short) for full in (4, 3, 2, 1)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--method", "guess"), "guess"),
        (("--tokens", 100), "--tokens"),
        (("--tokens", 2000), "--tokens 2000: the model was trained for 1024 positions"),
        (("--keys", 21), "--keys"),
        (("--steps", 0), "--steps"),
        (("--texts", 0), "--texts"),
        (("--context", 2048), "2048"),
        (("-o", "."), "--output .: is a folder"),
        (("-r", "nowhere.toml"), "nowhere.toml"),
    ],
)
def test_wrong_options(
    options: tuple[Any, ...], message: str, cetane: Cetane, folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    result = cetane("heads", "model", "-r", "plain.toml", *options)
    assert message in result.error
    assert not (folder / "heads.json").exists()


def test_a_model_that_is_not_there(cetane: Cetane, tmp_path: Path) -> None:
    assert "no-model" in cetane("heads", tmp_path / "no-model").error


def test_heads_are_drawn_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight layers or fewer in a line of 80 columns; those that cannot stream are left out."""
    lines = shown(result_of([20] * 4, [[0.9, 0.1, 0.2], [], [0.1, 0.8, 0.7]]), capsys)
    assert lines[:2] == [
        "the half of the heads that keeps all tokens, by mass (#: keeps)",
        "  00 #..   02 .##",
    ]
    many = shown(result_of([20] * 4, [[0.1, 0.2]] * 9), capsys)
    assert [line.count("#") + line.count(".") for line in many[1:3]] == [16, 2]
    wide = shown(result_of([20] * 4, [[0.1] * 32] * 5), capsys)
    assert [len(line) for line in wide[1:4]] == [75, 75, 37]


@pytest.mark.parametrize(
    ("found", "down"), [([20, 20, 20, 19], 25), ([20, 20, 18, 20], 75), ([20, 18, 0, 0], 100)]
)
def test_down_to_which_share_recall_holds(
    found: list[int], down: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """From 95 % on; a smaller share below one that does not hold is chance."""
    lines = shown(result_of(found, [[0.1, 0.2]]), capsys)
    assert lines[-1] == f"recall holds (0.95 of the model's) down to {down}% of the heads"
    assert all(len(line) <= 80 for line in lines)
    rows = [
        line.split() for line in lines if line.strip().endswith(("1.00", f"{found[2] / 20:.2f}"))
    ]
    assert ["50%", "60.0", "MB", "60%", str(found[2]), "of", "20", f"{found[2] / 20:.2f}"] in rows


def test_a_model_that_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(result_of([0, 0, 0, 0], [[0.1, 0.2]]), capsys)
    assert lines[-1].startswith("the model finds no key with all its heads")
