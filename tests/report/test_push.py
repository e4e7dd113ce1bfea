"""Uploads to the Hugging Face hub: the card, the files, and what is refused; no network."""

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import yaml
from tests.report.conftest import measured_on_the_ane
from tests.speculate.draft_head_models import NOTHING, held_out, random_draft_head

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.pipeline.export import export_contract, export_runtime
from cetane.report.push import push
from cetane.speculate.draft_heads.build import add_draft_head

BUNDLE: dict[str, Any] = {
    "contract": "stateful", "layout": {"kind": "single"}, "tensor_layout": "ct1",
    "head": {"slices": 2},
}  # fmt: skip


@pytest.fixture
def bundle(tiny_bundle) -> Bundle:
    return tiny_bundle(**BUNDLE)


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


@pytest.fixture(scope="module")
def exports(tiny_bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each layout."""
    root, bundle = tmp_path_factory.mktemp("exports"), tiny_bundle(**BUNDLE)
    export_runtime(bundle.path, root / "anemll", "anemll")
    export_contract(bundle.path, root / "contract")
    return root


def files_in(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize(("kind", "said"), [("anemll", "compile.sh"), ("contract", "host.py")])
def test_an_exported_folder(kind: str, said: str, bundle: Bundle, exports: Path) -> None:
    """Its card has the gates of its bundle, and says how its app runs it."""
    done = push(exports / kind, "me/tiny", bundle=bundle.path, dry_run=True)
    assert done.kind == kind and said in done.card
    assert set(done.files) == files_in(exports / kind)
    json.dumps(done.as_json())


@pytest.mark.parametrize("kind", ["anemll", "contract"])
def test_the_sizes_of_an_exported_folder_are_its_own(
    kind: str, bundle: Bundle, exports: Path
) -> None:
    """Counted on the disk. The bundle's recipe, for one, does not go up."""
    card = push(exports / kind, "me/tiny", bundle=bundle.path, dry_run=True).card
    rows = card.partition("## Sizes")[2].partition("| cache at")[0]
    shown = dict(re.findall(r"^\| (\S+) \| (\d[\d.e-]*) \|$", rows, re.M))
    folder = exports / kind
    parts = [*folder.iterdir(), *(folder / "shards").glob("*")]
    there = {path.name.removesuffix(".mlpackage"): path for path in parts if path.name != "shards"}
    assert shown.keys() == there.keys()
    for name, path in there.items():
        assert float(shown[name]) == pytest.approx(nbytes(path) / 1e6, rel=6e-3)
    assert f"| size | {nbytes(folder) / 1e6:.4g} MB" in card


def nbytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


WRONG: list[tuple[str, Callable[[Path], Any], str]] = [
    ("anemll", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    ("anemll", lambda f: (f / "meta.yaml").write_text("{}"), "meta.yaml"),
    ("anemll", lambda f: shutil.rmtree(f / "llama_lm_head.mlpackage"), "llama_lm_head"),
    ("anemll", lambda f: edit(f / "config.json", eos_token_id=5), "config.json is not the file"),
    ("anemll", lambda f: edit(f / "cetane.json", files={}), "is not in cetane.json"),
    ("contract", lambda f: (f / "embedding.npy").unlink(), "embedding.npy is missing"),
    ("contract", lambda f: shutil.rmtree(f / "tokenizer"), "tokenizer/.* is missing"),
    ("contract", lambda f: (f / "shards/model.mlpackage/Manifest.json").write_text("{}"),
     "Manifest.json is not the file that was built"),
    ("contract", lambda f: edit(f / "contract.json", context=1), "contract.json is not what an"),
    ("contract", lambda f: edit(f / "contract.json", tables={"x": ["cetane.json"]}),
     "contract.json is not what an export"),
    ("contract", lambda f: sees_the_next_token(f / "host.py"), "host.py is not what an export"),
    ("contract", lambda f: (f / "host.py").unlink(), "host.py"),
    ("contract", lambda f: (f / "CONTRACT.md").write_text("x"), "CONTRACT.md is not what an ex"),
]  # fmt: skip


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def sees_the_next_token(host: Path) -> None:
    """Another mask in a host."""
    code = host.read_text()
    assert "keys <= queries" in code
    host.write_text(code.replace("keys <= queries", "keys < queries + 2"))


@pytest.mark.parametrize(("kind", "damage", "said"), WRONG)
def test_an_exported_folder_that_is_wrong(
    kind: str, damage: Callable[[Path], Any], said: str, bundle: Bundle, exports: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    """The gates of the bundle are not about it."""
    folder = shutil.copytree(exports / kind, tmp_path / "folder")
    damage(folder)
    with pytest.raises(CetaneError, match=f"no whole export of .*{said}") as caught:
        push(folder, "me/tiny", bundle=bundle.path, dry_run=True)
    assert f"--layout {kind}" in str(caught.value.hint)


@pytest.mark.parametrize("kind", ["anemll", "contract"])
@pytest.mark.parametrize(
    "stray",
    [".env", "notes.txt", "tokenizer/.env", "shards/model.mlpackage/.env", "recipe.toml",
     "llama_lm_head.mlpackage/.env", "llama_lm_head.mlpackage/.git/config"],
)  # fmt: skip
def test_files_of_no_export(
    kind: str, stray: str, bundle: Bundle, exports: Path, tmp_path: Path
) -> None:
    """They may be private."""
    folder = shutil.copytree(exports / kind, tmp_path / "folder")
    (folder / stray).parent.mkdir(parents=True, exist_ok=True)
    (folder / stray).write_text("TOKEN=1")
    with pytest.raises(CetaneError, match=f"{re.escape(stray)} is no file of the layout {kind}"):
        push(folder, "me/tiny", bundle=bundle.path, dry_run=True)


def test_files_that_tools_leave(bundle: Bundle, exports: Path, tmp_path: Path) -> None:
    """Python's cache beside a host stays here; a package that a Mac compiled goes up."""
    host = shutil.copytree(exports / "contract", tmp_path / "contract")
    (host / "__pycache__").mkdir()
    (host / "__pycache__" / "host.cpython-312.pyc").write_bytes(b"x")
    assert set(push(host, "me/x", bundle=bundle.path, dry_run=True).files) == files_in(
        exports / "contract"
    )
    app = shutil.copytree(exports / "anemll", tmp_path / "anemll")
    for package in app.glob("*.mlpackage"):
        package.rename(package.with_suffix(".mlmodelc"))
    done = push(app, "me/x", bundle=bundle.path, dry_run=True)
    assert set(done.files) == files_in(app)
    assert "compile" not in done.card.partition("## How to run")[2], "nothing is left to compile"
    assert "On a Mac, load the folder with" in done.card


def test_a_folder_for_coreml_llm_that_is_wrong(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "model_config.json").write_text("{}")
    (tmp_path / "cetane.json").write_text(json.dumps({"bundle": bundle.digest}))
    with pytest.raises(CetaneError, match=r"no whole export of .*model_config\.json"):
        push(tmp_path, "me/tiny", bundle=bundle.path, dry_run=True)


@pytest.mark.parametrize(
    ("kind", "origin"),
    [("contract.json", "contract.json"), ("meta.yaml", "cetane.json"),
     ("model_config.json", "cetane.json")],
)  # fmt: skip
def test_a_folder_of_another_bundle(kind: str, origin: str, bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / kind).write_text("{}")
    unknown = pytest.raises(CetaneError, match=rf"not tell from which bundle it is \({origin}\)")
    with unknown as refused:
        push(tmp_path, "me/tiny", bundle=bundle.path, dry_run=True)
    layout = {"contract.json": "contract", "meta.yaml": "anemll"}.get(kind, "coreml-llm")
    assert refused.value.hint is not None
    assert f"cetane export {bundle.path} --layout {layout} -o FOLDER" in refused.value.hint
    (tmp_path / origin).write_text('{"bundle": "0000"}')
    with pytest.raises(CetaneError, match="exported from another bundle"):
        push(tmp_path, "me/tiny", bundle=bundle.path, dry_run=True)


def test_text_in_a_draft_head(judged: Bundle, tmp_path: Path) -> None:
    """The user agrees before their own text goes up; other text is only named."""
    made = Bundle(shutil.copytree(judged.path, tmp_path / "made"))
    name = "heads/medusa/held-out.npy"
    head, windows = random_draft_head("medusa", made), held_out(made)
    draft = add_draft_head(made, head, windows, NOTHING)
    done = push(made.path, "me/tiny", dry_run=True)
    assert name in done.files and done.texts == [name]
    shutil.rmtree(draft.path)
    mine = NOTHING.model_copy(update={"data": {"diary.txt": "0" * 64}})
    add_draft_head(made, head, windows, mine)
    with pytest.raises(CetaneError, match=r"a tenth of diary\.txt in heads/medusa") as caught:
        push(made.path, "me/tiny", dry_run=True)
    assert "--held-out" in str(caught.value.hint)
    assert push(made.path, "me/tiny", held_out=True, dry_run=True).texts == [name]
    folder = export_contract(made.path, tmp_path / "contract")  # without the text
    done = push(folder, "me/tiny", bundle=made.path, dry_run=True)
    assert not done.texts and name not in done.files


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
    measured_on_the_ane(Bundle(copy))
    card = push(copy, "me/tiny", dry_run=True).card
    assert "Only where ops run was measured on a device: Apple M4 Max, macOS 26.1." in card
    assert "measured, Apple M4 Max, macOS 26.1 |" in card and "Nothing here" not in card
    other = push(copy, "me/tiny", chip="a13", dry_run=True).card
    assert "Nothing here was measured on a device" in other and "Apple M4 Max" not in other
