"""cetane vocabulary: a subset from texts, and a bundle that has it."""

import json
from pathlib import Path

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.schema.subset import load_subset

from .conftest import SMALL, Cetane


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """One to choose from, with every merge, and one of bytes that the first lacks."""
    one, other = tmp_path / "one.txt", tmp_path / "other.txt"
    one.write_text("The rating of how readily a fuel ignites is its cetane number. " * 200)
    other.write_text("assistant: user: " * 200)
    return one, other


def test_vocabulary(
    cetane: Cetane,
    texts: tuple[Path, Path],
    tiny_checkpoint_folder: Path,
    tmp_path: Path,
    small_file: Path,
) -> None:
    one, other = texts
    out = tmp_path / "subset.json"
    tokenizer = open_checkpoint(tiny_checkpoint_folder).tokenizer
    found = cetane(
        "vocabulary", tiny_checkpoint_folder, "--text", one, "--held-out", other,
        "--choices", 300, "--coverage", 0.9, "-o", out, "-r", small_file, "--json",
    ).json  # fmt: skip
    subset = load_subset(out)
    subset.check(tokenizer)
    assert found["necessary"] == 257
    chosen = next(row for row in found["sizes"] if row["chosen"])
    assert chosen["tokens"] == len(subset.ids) == 288  # 257 are rounded up
    for counted in (*subset.texts, *subset.held_out):  # two windows, the last not whole
        assert 256 < counted.choices < 512
    few = found["sizes"][0]
    ids = np.array(tokenizer.encode(other.read_text()))
    assert few["held_out"] == pytest.approx((ids < 257).mean())
    assert few["head_bytes"] == 2 * 257 * 64
    shown = cetane("vocabulary", tiny_checkpoint_folder, "--text", one, "--choices", 0,
                   "-r", small_file, "-o", out)  # fmt: skip
    assert shown.code == 0
    assert "coverage by size" in shown.out
    assert shown.out.endswith('recipe beside it:\n  [head]\n  subset = "subset.json"\n')
    assert load_subset(out).texts[0].choices == 0


def test_formats_that_a_port_chooses(
    cetane: Cetane, texts: tuple[Path, Path], tiny_checkpoint_folder: Path, small_file: Path
) -> None:
    small_file.write_text(SMALL + '[compression]\ndefault = "auto"\n')
    out = small_file.with_name("subset.json")
    found = cetane("vocabulary", tiny_checkpoint_folder, "--text", texts[0], "--choices", 0,
                   "-r", small_file, "-o", out, "--json").json  # fmt: skip
    sizes = {size["tokens"]: size["head_bytes"] for size in found["sizes"]}
    assert sizes[257] == 257 * (64 + 2)  # bytes and scales: 257 rows are no whole groups of 32
    assert sizes[288] == 288 * 64 * 6 // 8 + 288 // 32 * 64 * 2  # indices and palettes


def test_a_bundle_with_it(
    cetane: Cetane,
    texts: tuple[Path, Path],
    tiny_checkpoint_folder: Path,
    tmp_path: Path,
    small_file: Path,
) -> None:
    out, bundle = tmp_path / "subset.json", tmp_path / "bundle"
    cetane("vocabulary", tiny_checkpoint_folder, "--text", texts[0], "--choices", 0,
           "-r", small_file, "-o", out)  # fmt: skip
    content = json.loads(out.read_text())
    content["tokens"] = "0-270"
    out.write_text(json.dumps(content))
    small_file.write_text(SMALL + '[head]\nsubset = "subset.json"\n')
    assert cetane("build", tiny_checkpoint_folder, "-r", small_file, "-o", bundle).code == 0
    planned = cetane("plan", tiny_checkpoint_folder, "-r", small_file).out
    assert "the head can choose 271 of 288 tokens" in planned
    out.unlink()  # the bundle has its own
    assert Bundle(bundle).plan.rows == 271
    assert cetane("run", bundle, "What ignites?", "--max-new", 4).code == 0


@pytest.mark.parametrize("bad", ["missing.txt", "short.txt"])
def test_texts_that_tell_nothing(
    bad: str, cetane: Cetane, tiny_checkpoint_folder: Path, tmp_path: Path, small_file: Path
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    out = tmp_path / "subset.json"
    result = cetane("vocabulary", tiny_checkpoint_folder, "--text", tmp_path / bad,
                    "-r", small_file, "-o", out)  # fmt: skip
    assert bad in result.error
    assert not out.exists()
