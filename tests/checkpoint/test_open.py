"""What a source string is taken for."""

import os
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text('{"model_type": "llama"}')
    save_file({"a": torch.ones(2)}, tmp_path / "m" / "model.safetensors")
    return tmp_path / "m"


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub that has one model; the list holds what was asked of it."""
    asked = []

    def snapshot_download(repo_id: str, **patterns: Any) -> str:
        asked.append(repo_id)
        assert "*.bin" not in patterns["allow_patterns"]
        assert {"*.json", "tokenizer.model", "merges.txt"} < {*patterns["allow_patterns"]}
        if repo_id != "org/model-1.5":
            raise OSError(f"{repo_id} was not found\nwith details\non more lines")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "m.gguf"])
def test_pointers_of_git_lfs(name: str, folder: Path) -> None:
    """A clone without Git LFS holds them in place of large files."""
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 132\n"
    (folder / name).write_text(pointer)
    with pytest.raises(CetaneError, match=rf"{name} is a pointer of Git LFS") as caught:
        _ = open_checkpoint(folder / name if name == "m.gguf" else folder).tokenizer
    assert caught.value.hint == f"run in {folder}: git lfs pull"


def test_a_bundle_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"schema_version": 3, "source": "org/model"}')
    with pytest.raises(CetaneError, match="holds a bundle, not a model") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "give the model that it was made of: org/model"


def test_hub_id(hub: list[str]) -> None:
    checkpoint = open_checkpoint("org/model-1.5")
    assert checkpoint.source == "org/model-1.5" and checkpoint.names() == ["a"]


def test_files_that_are_taken_of_a_hub_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own rule picks them: a template for tools, but no other export of the weights."""
    taken = [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer.model"),
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
    ]
    others = [
        *("original/params.json", "onnx/model.safetensors", "fp16/tokenizer.model"),
        *("consolidated.safetensors", "pytorch_model.bin", "README.md", "onnx/chat_template.jinja"),
    ]
    found = []

    def snapshot_download(repo_id: str, **patterns: Any) -> str:
        found.extend(filter_repo_objects(taken + others, **patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    open_checkpoint("org/model-1.5")
    assert found == taken


def test_hub_failure_is_one_line(hub: list[str]) -> None:
    with pytest.raises(CetaneError, match="org/other was not found") as caught:
        open_checkpoint("org/other")
    assert "\n" not in str(caught.value)


def test_hub_model_of_gguf_files(
    hub: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a config, as some hold them."""
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: ["m-Q8_0.gguf", "README.md"])
    with pytest.raises(CetaneError, match="holds GGUF files") as caught:
        open_checkpoint("org/model-1.5")
    assert "hf download org/model-1.5 m-Q8_0.gguf" in str(caught.value.hint)


def test_hub_model_of_pickles(
    hub: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by the hub's list of files, since none of them is downloaded."""
    (folder / "model.safetensors").unlink()
    names = ["config.json", "pytorch_model.bin"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda _: names)
    with pytest.raises(CetaneError, match=r"org/model-1\.5/pytorch_model\.bin is a pickle"):
        open_checkpoint("org/model-1.5")

    def offline(_: str) -> list[str]:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    with pytest.raises(CetaneError, match="has no safetensors file"):
        open_checkpoint("org/model-1.5")


def test_existing_path_wins(hub: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    shutil.copytree(folder, "org/model-1.5")
    assert open_checkpoint("org/model-1.5").read("a").tolist() == [1, 1]
    assert not hub


@pytest.mark.parametrize("source", ["nope", "a/b/c", "/no/such", "org/m.gguf", "org/m.bin", "../x"])
def test_no_such_path(source: str, hub: list[str]) -> None:
    with pytest.raises(CetaneError, match=f"no such file or folder: {source}"):
        open_checkpoint(source)
    assert not hub


def test_a_folder_of_the_hubs_cache_leads_to_its_snapshot(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "models--org--model"
    (model / "refs").mkdir(parents=True)
    with pytest.raises(CetaneError, match=r"has no config.json \(give the folder that holds it\)"):
        open_checkpoint(model)
    shutil.copytree(folder, model / "snapshots/0123abcd")
    with pytest.raises(CetaneError, match=rf"\(give {model}/snapshots/0123abcd\)"):
        open_checkpoint(model)


def test_an_empty_name_is_not_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert open_checkpoint(".").read("a").tolist() == [1, 1]
    with pytest.raises(CetaneError, match="the model has no name"):
        open_checkpoint("")


@pytest.mark.parametrize("name", ["m/model.safetensors", "m.gguf"])
@pytest.mark.parametrize("device", [False, True])
def test_what_is_no_regular_file(folder: Path, tmp_path: Path, name: str, device: bool) -> None:
    """Neither is read: a pipe blocks, and /dev/zero never ends."""
    path = tmp_path / name
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero") if device else os.mkfifo(path)
    with pytest.raises(CetaneError, match=f"{path} is not a regular file"):
        open_checkpoint(folder if name.startswith("m/") else path)


def test_gguf_is_known_by_name_or_content(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"GGUF")
    (tmp_path / "m.gguf").write_bytes(b"\0" * 30)
    (tmp_path / "notes.txt").write_text("hello")
    for name, match in (
        ("blob", "not a valid GGUF"),
        ("m.gguf", "does not start with GGUF"),
        ("notes.txt", "neither a GGUF nor a safetensors"),
    ):
        with pytest.raises(CetaneError, match=match):
            open_checkpoint(tmp_path / name)
