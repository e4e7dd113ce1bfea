"""Where the checkpoint of a bundle is looked for, by the word of whoever made the bundle."""

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from tests.conftest import build_model

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.pipeline.origin import checkpoint_of


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The places that somebody asked for; none of them answers."""
    asked: list[Any] = []

    def refuse(*where: Any, **_: Any) -> None:
        asked.append(where)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return asked


@pytest.fixture
def from_source(tiny_bundle: Callable[..., Bundle], tmp_path: Path) -> Callable[[str], Bundle]:
    """`from_source(SOURCE)`: a bundle whose manifest names this model."""

    def made(source: str) -> Bundle:
        folder = tmp_path / "bundle"
        shutil.copytree(tiny_bundle().path, folder)
        manifest = folder / "manifest.json"
        content = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(content | {"source": source}))
        return Bundle(folder)

    return made


@pytest.mark.parametrize("source", ["http://127.0.0.1:1/a model", "hf://org/model", "org/model"])
def test_a_bundle_starts_no_connection(
    source: str, from_source: Callable[[str], Bundle], connections: list[Any]
) -> None:
    """It would be a stranger's choice whom this machine asks for what. The user may ask."""
    with pytest.raises(CetaneError) as caught:
        checkpoint_of(from_source(source))
    assert source in caught.value.message
    given = f"'{source}'" if " " in source else source
    assert caught.value.hint == f"--model MODEL says where it is now, or gets it: --model {given}"
    assert not connections


def test_a_model_that_the_user_names_is_fetched(
    from_source: Callable[[str], Bundle], connections: list[Any]
) -> None:
    with pytest.raises(CetaneError, match="cannot get org/model from the Hugging Face hub"):
        checkpoint_of(from_source("org/model"), "org/model")
    assert connections


def test_a_hub_model_that_the_build_fetched_is_found_again(
    tiny_checkpoint_folder: Path,
    from_source: Callable[[str], Bundle],
    connections: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the cache, as the hub's client lays it out."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny_checkpoint_folder, folder / "snapshots" / ("0" * 40))
    assert checkpoint_of(from_source("org/model")).source == "org/model"
    assert not connections


def test_the_width_of_an_mlp_is_part_of_the_shape(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """No input and no output shows it. By hand: in each of two layers, three matrices of 64
    columns have 32 rows more, in fp16."""
    wider = shutil.copytree(tiny_checkpoint_folder, tmp_path / "wider")
    build_model("llama", intermediate_size=128).save_pretrained(wider)
    bundle = tiny_bundle()
    ours = bundle.plan.weight_bytes
    theirs = ours + 2 * 3 * 64 * 32 * 2
    with pytest.raises(CetaneError, match=f"its weight_bytes {theirs}, not {ours}"):
        checkpoint_of(bundle, wider)


def test_a_copy_with_other_dates_is_the_same_model(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(tiny_checkpoint_folder, tmp_path / "copy", copy_function=shutil.copy)
    bundle = tiny_bundle()
    found = checkpoint_of(bundle, copy)
    assert found.fingerprint != bundle.manifest.fingerprint
    assert found.source == str(copy)
