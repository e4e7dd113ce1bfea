"""Uploads to the Hugging Face hub: the card, the files, and what is refused; no network."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import yaml

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.report.push import push


@pytest.fixture
def bundle(tiny_bundle) -> Bundle:
    return tiny_bundle(contract="stateful", layout={"kind": "single"}, tensor_layout="ct1",
                       head={"slices": 2})  # fmt: skip


class Hub:
    """The hub's client, without a hub."""

    made: ClassVar[list[Any]] = []

    def __init__(self, **_: Any) -> None:
        Hub.made = []

    def create_repo(self, repo: str, **options: Any) -> None:
        Hub.made.append((repo, options))

    def create_commit(self, repo: str, operations: list[Any], **options: Any) -> Any:
        Hub.made.append(operations)
        return type("Info", (), {"commit_url": f"https://huggingface.co/{repo}/commit/1"})


def front(card: str) -> dict[str, Any]:
    """The card's metadata."""
    return yaml.safe_load(card.split("---\n")[1])


def test_a_dry_run_contacts_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    done = push(bundle.path, "me/tiny", license="apache-2.0", dry_run=True)
    assert done.url is None and done.kind == "bundle"
    assert set(bundle.manifest.files) | {"manifest.json"} <= set(done.files)
    about = front(done.card)
    assert about["library_name"] == "coreml" and about["license"] == "apache-2.0"
    assert "base_model" not in about  # a local folder is on no hub
    assert "| golden |" in done.card and "| not run |" in done.card
    assert "cetane run model" in done.card
    megabytes = sum(part.bytes for part in bundle.manifest.files.values()) / 1e6
    assert f"| {megabytes:.4g} MB" in done.card.replace("size | ", "| ")
    assert huggingface_hub.ModelCard(done.card).data.library_name == "coreml"


def test_an_upload(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    done = push(bundle.path, "me/tiny")
    assert done.url == "https://huggingface.co/me/tiny/commit/1"
    (repo, options), operations = Hub.made
    assert repo == "me/tiny" and options == {"private": True, "exist_ok": True}
    paths = {operation.path_in_repo for operation in operations}
    assert paths == {"README.md", *done.files}


def test_a_bundle_that_came_from_the_hub(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`hf download --local-dir` leaves notes, which the hub's client refuses to upload."""
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    copy = shutil.copytree(bundle.path, tmp_path / "model")
    notes = copy / ".cache" / "huggingface" / "download" / "manifest.json.metadata"
    notes.parent.mkdir(parents=True)
    for path in (notes, copy / "README.md", copy / ".gitattributes"):
        path.write_text("the hub's")
    assert push(copy, "me/other").files == push(bundle.path, "me/other").files


def test_a_hub_that_refuses(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Hub):
        def create_repo(self, repo: str, **options: Any) -> None:
            raise OSError("no network\nhere")

    monkeypatch.setattr(huggingface_hub, "HfApi", Refusing)
    with pytest.raises(CetaneError, match="cannot push to me/tiny: no network here") as caught:
        push(bundle.path, "me/tiny")
    assert "hf auth login" in str(caught.value.hint)


def test_no_network(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own client, whose errors are of another kind."""
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    api = partial(huggingface_hub.HfApi, endpoint="http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub, "HfApi", api)
    with pytest.raises(CetaneError, match="cannot push to me/tiny"):
        push(bundle.path, "me/tiny")


def test_what_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="'tiny' is no repository"):
        push(bundle.path, "tiny", dry_run=True)
    with pytest.raises(CetaneError, match="neither a bundle nor an export"):
        push(tmp_path, "me/tiny", dry_run=True)
    (tmp_path / "meta.yaml").write_text("{}")
    with pytest.raises(CetaneError, match="no gates for its card"):
        push(tmp_path, "me/tiny", dry_run=True)


def test_an_exported_folder(bundle: Bundle, tmp_path: Path) -> None:
    """Its card has the gates of its bundle, and says how its app runs it."""
    (tmp_path / "meta.yaml").write_text("{}")
    (tmp_path / "cetane.json").write_text(json.dumps({"bundle": bundle.digest}))
    done = push(tmp_path, "me/tiny-anemll", bundle=bundle.path, dry_run=True)
    assert done.kind == "anemll" and "compile.sh" in done.card
    assert set(done.files) == {"cetane.json", "meta.yaml"}
    json.dumps(done.as_json())


@pytest.mark.parametrize(
    ("kind", "origin"),
    [("contract.json", "contract.json"), ("meta.yaml", "cetane.json"),
     ("model_config.json", "cetane.json")],
)  # fmt: skip
def test_a_folder_of_another_bundle(kind: str, origin: str, bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / kind).write_text("{}")
    with pytest.raises(CetaneError, match=rf"does not tell from which bundle it is \({origin}\)"):
        push(tmp_path, "me/tiny", bundle=bundle.path, dry_run=True)
    (tmp_path / origin).write_text('{"bundle": "0000"}')
    with pytest.raises(CetaneError, match="exported from another bundle"):
        push(tmp_path, "me/tiny", bundle=bundle.path, dry_run=True)


def test_the_card_says_what_a_device_measured(judged: Bundle, tmp_path: Path) -> None:
    """And no name of a file in a bundle writes into it."""
    copy = tmp_path / "copy"
    shutil.copytree(judged.path, copy)
    (copy / "gates" / "<b> x.json").write_text(
        json.dumps({"bundle": judged.digest, "passed": True})
    )
    card = push(copy, "me/tiny", dry_run=True).card
    assert "were measured on that device" in card and "Nothing here" not in card
    assert "<b>" not in card
    (copy / "gates" / "device.json").unlink()
    assert "Nothing here was measured on a device" in push(copy, "me/tiny", dry_run=True).card
