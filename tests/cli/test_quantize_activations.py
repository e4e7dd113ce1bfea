"""cetane quantize-activations, as a user sees it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.activations.conftest import INT8

from cetane.bundle import Bundle

from .conftest import Cetane


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(**INT8)


def test_a_bundle_and_its_figures(cetane: Cetane, bundle: Bundle, tmp_path: Path) -> None:
    target = tmp_path / "a8"
    wide = ("--samples", "random", "--tokens", 60)
    result = cetane("quantize-activations", bundle.path, "-o", target, *wide)
    assert result.code in (0, 1), result.err
    assert ("pass" if result.code == 0 else "FAIL") in result.out.splitlines()[-2]
    assert result.out.splitlines()[-1].startswith("next: ")
    assert "perplexity" in result.out
    Bundle(target).verify()
    again = cetane("quantize-activations", bundle.path, "-o", target, *wide, "--force", "--json")
    assert again.code == result.code
    figures = again.json
    assert figures["passed"] == (again.code == 0)
    assert figures["passed"] == all(s["cosine"] >= 0.95 for s in figures["after"]["shards"])
    assert figures["tokens"] == 59


def test_what_may_pass(cetane: Cetane, bundle: Bundle, tmp_path: Path) -> None:
    naive = ("--samples", "random", "--ranges", "last", "--additions", "--tokens", 60)
    result = cetane("quantize-activations", bundle.path, "-o", tmp_path / "all", *naive,
                    "--tensors", "all")  # fmt: skip
    assert result.code == 1
    assert result.out.splitlines()[-1].startswith("next: --tensors inputs")
    result = cetane("quantize-activations", bundle.path, "-o", tmp_path / "inputs", *naive)
    assert result.code == 1
    assert "--set compression.rotate=true" in result.out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--text", "missing.txt"), "cannot read missing.txt"),
        (("--model", "missing"), "missing"),
        (("--samples", "some"), "'some' is not one of"),
    ],
)
def test_bad_options(
    cetane: Cetane, ported: Bundle, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    result = cetane("quantize-activations", ported.path, "-o", tmp_path / "a8", *options)
    assert result.code == 2 and words in result.err
    assert not list(tmp_path.iterdir())


def test_states(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    result = cetane("quantize-activations", ported.path, "-o", tmp_path / "a8")
    assert "has states" in result.error and "readonly" in result.err
    assert not list(tmp_path.iterdir())


def test_no_bundle(cetane: Cetane, tmp_path: Path) -> None:
    result = cetane("quantize-activations", tmp_path / "none", "-o", tmp_path / "a8")
    assert "no such bundle" in result.error
