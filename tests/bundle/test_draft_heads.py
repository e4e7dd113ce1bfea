"""Draft heads in a bundle: what was trained for it, whole, or refused; a kill leaves a bundle."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.speculate.draft_head_models import NOTHING, held_out, random_draft_head, with_draft_head

from cetane.bundle import Bundle
from cetane.engine.open import open_backend
from cetane.errors import CetaneError
from cetane.files import records
from cetane.gates import draft_head
from cetane.gates.draft_head import (
    DRAFTS,
    DraftHeadResult,
    drafts_of,
    judge_draft_heads,
    load_trained,
    same_constants,
    same_interface,
)
from cetane.mil import load
from cetane.pipeline.export import export_contract, export_coreai, export_onnx, export_runtime
from cetane.pipeline.recompile import recompile
from cetane.schema.draft_head import FOLDER, DraftHeadKind
from cetane.speculate.draft_heads import build as head_build
from cetane.speculate.draft_heads.blocks import EagleKeys, EagleLayer
from cetane.speculate.draft_heads.drafter import open_drafter
from cetane.speculate.draft_heads.features import tapped_shards

pytestmark = pytest.mark.usefixtures("shared_templates")
FILES = (
    "head.json", "held-out.npy", "source.safetensors", "vocabulary.npy",
    "medusa.mlpackage/Manifest.json",
    "medusa.mlpackage/Data/com.apple.CoreML/model.mlmodel",
    "medusa.mlpackage/Data/com.apple.CoreML/weights/weight.bin",
)  # fmt: skip


@pytest.fixture(scope="module")
def body(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(contract="shift", layout={"kind": "chunks", "chunks": 2})


@pytest.fixture(scope="module")
def made(body: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a Medusa head."""
    path = shutil.copytree(body.path, tmp_path_factory.mktemp("heads") / "bundle")
    bundle = Bundle(path)
    with_draft_head(bundle, random_draft_head("medusa", bundle))
    return path


@pytest.fixture
def path(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "bundle")


def test_exports_take_it_along_or_refuse_it_by_name(made: Path, tmp_path: Path) -> None:
    assert "draft" in " ".join(export_onnx(made, tmp_path / "onnx").files["medusa"])
    for export in (
        export_coreai,
        lambda source, target: export_runtime(source, target, "anemll"),
        lambda source, target: export_runtime(source, target, "coreml-llm"),
    ):  # fmt: skip
        with pytest.raises(CetaneError, match="has the draft head medusa, which"):
            export(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def contents(path: Path) -> dict[str, bytes]:
    """All bytes of a file or a folder."""
    files = [path, *path.rglob("*")]
    return {str(f.relative_to(path)): f.read_bytes() for f in files if f.is_file()}


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_contract_takes_it_along(body: Bundle, tmp_path: Path, kind: str) -> None:
    """Its files are there, every input is named with its shape and who fills it, and the host
    runs as without it."""
    bundle = Bundle(shutil.copytree(body.path, tmp_path / "bundle"))
    head = with_draft_head(bundle, random_draft_head(kind, bundle))
    folder = export_contract(bundle.path, tmp_path / "out")
    contract = json.loads((folder / "contract.json").read_text())
    told = contract["draft_heads"].pop(kind)
    for file in told["files"]:
        assert contents(folder / file) == contents(bundle.path / file)
    package = load(folder / told["files"][0])
    assert package.functions.keys() == {function["name"] for function in told["functions"]}
    for function in told["functions"]:
        inputs = package.functions[function["name"]].inputs
        assert {i["name"]: tuple(i["shape"]) for i in function["inputs"]} == {
            name: tuple(kind.shape) for name, kind in inputs.items()
        }
        assert all(item["means"] for item in [*function["inputs"], *function["outputs"]])
    page = (folder / "CONTRACT.md").read_text()
    assert f"### {kind}/draft" in page and "proposes from | reads |" in page
    assert told["taps"] == list(head.manifest.taps) and told["rows"] == 40
    bare = export_contract(body.path, tmp_path / "bare")
    assert json.loads((bare / "contract.json").read_text()) == contract
    assert "raft head" not in (bare / "CONTRACT.md").read_text()
    assert (bare / "host.py").read_text() == (folder / "host.py").read_text()


def test_recompile_takes_it_along(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    fresh = SimpleNamespace(forget=lambda shard: None, open=compiled.append)
    monkeypatch.setattr("cetane.pipeline.recompile.CoreMLBackend", lambda shards: fresh)
    assert [*recompile(made)] == compiled == [*Bundle(made).plan.by_name, "medusa"]


def head_of(path: Path) -> Path:
    return path / FOLDER / "medusa"


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    file = head_of(path) / "head.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_round_trip(path: Path, body: Bundle) -> None:
    bundle = Bundle(path)
    bundle.verify()
    assert bundle.digest == body.digest
    (head,) = bundle.draft_heads().values()
    on_disk = {p.relative_to(head.path).as_posix() for p in head.path.rglob("*") if p.is_file()}
    assert on_disk == set(FILES) == {"head.json", *head.manifest.files}
    assert head.manifest.taps == ("chunk-01",)
    wanted = random_draft_head("medusa", bundle)
    assert np.array_equal(head.vocabulary(), wanted.vocabulary.numpy())
    assert np.array_equal(head.held_out(), held_out(bundle).numpy())


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("damage", ["flip", "append", "unlink"])
def test_a_file_that_was_changed(path: Path, name: str, damage: str) -> None:
    file = head_of(path) / name
    content = bytearray(file.read_bytes())
    if damage == "unlink":
        file.unlink()
    elif damage == "append":
        file.write_bytes(content + b"\0")
    else:
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(CetaneError, match=name):
        Bundle(path).verify()


@pytest.mark.parametrize(
    "name", ["heads/x", "heads/medusa/x", "heads/other/head.json", "heads/medusa/x/.y", "heads/.x"]
)
def test_a_file_that_is_not_listed(path: Path, name: str) -> None:
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(b"x")
    with pytest.raises(CetaneError, match=f"{name} is not in the manifest"):
        Bundle(path).verify()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "../../manifest.json"])
def test_a_manifest_that_points_outside(path: Path, name: str) -> None:
    edit(path, lambda c: c["files"].update({name: {"bytes": 0, "sha256": ""}}))
    with pytest.raises(CetaneError, match="points outside the bundle"):
        Bundle(path).verify()


@pytest.mark.parametrize("name", ["heads", "heads/medusa", "heads/medusa/vocabulary.npy"])
def test_a_symlink_that_leads_outside(path: Path, name: str) -> None:
    shutil.move(path / name, path.parent / "elsewhere")
    os.symlink(path.parent / "elsewhere", path / name)
    with pytest.raises(CetaneError, match="is a link"):
        Bundle(path).verify()


def test_a_head_of_another_bundle(path: Path) -> None:
    """Its hidden states would not be those that the head learned. The advice works."""
    manifest = path / "manifest.json"
    content = json.loads(manifest.read_text())
    content["producer"]["cetane"] = "another"
    manifest.write_text(json.dumps(content))
    other = Bundle(path)
    for act in (other.draft_heads, other.verify, other.gates):
        with pytest.raises(CetaneError, match=r"for another bundle \(remove the draft head's fol"):
            act()
    shutil.rmtree(path / "heads" / "medusa")
    other.verify()


def sources(content: Any) -> Any:
    return content["functions"][0]["inputs"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(schema_version=9), "schema 9; this cetane reads schema 1"),
        (lambda c: c.pop("functions"), "functions: Field required"),
        (lambda c: c.update(kind="pickle"), "kind: Input should be"),
        (lambda c: c.update(kind="eagle3"), "functions draft do not make the draft head eagle3"),
        (lambda c: c.update(rows=2**40), "rows: Input should be less"),
        (lambda c: c.update(steps=0), "steps: Input should be greater"),
        (lambda c: c.update(more=1), "more: unknown key; known: schema_version"),
        (
            lambda c: c.update(
                files=dict.fromkeys(map(str, range(1 << 15)), c["files"].popitem()[1])
            ),
            "files: Dictionary should have at most 16384 items",
        ),
        (
            lambda c: c["functions"].append(c["functions"][0]),
            "draft, draft do not make the draft head medusa",
        ),
        (lambda c: sources(c).update(shape=[2**40]), "more than 268,435,456"),
        (lambda c: sources(c)["source"].update(name="x"), "a drafter cannot supply hidden"),
        (lambda c: sources(c)["source"].update(name="features"), "a drafter cannot supply hidden"),
        (lambda c: c.update(taps=["x"]), "the draft head reads 'x', but no shard"),
        (lambda c: c.update(taps=["embed"]), "the draft head reads 'embed', but no shard"),
        (
            lambda c: sources(c).update(source={"host": "embedding", "table": "x"}),
            "a drafter cannot supply",
        ),
        (
            lambda c: sources(c).update(source={"host": "cache", "name": "a", "group": "kv"}),
            "no cache group kv",
        ),
        (
            lambda c: c["functions"][0]["outputs"][0]["sink"].update(name="x"),
            "a drafter cannot store logits_out",
        ),
        (lambda c: c["functions"][0].update(outputs=[]), "draft: the output logits is missing"),
    ],
)
def test_a_manifest_that_is_wrong(path: Path, change: Callable[[Any], Any], message: str) -> None:
    edit(path, change)
    with pytest.raises(CetaneError, match=message):
        Bundle(path).verify()


@pytest.mark.parametrize("name", ["draft", "follow", "read"])
def test_a_tensor_that_another_function_is_given(body: Bundle, tmp_path: Path, name: str) -> None:
    """Only the first call of an EAGLE-3 head reads features; later ones read what it made."""
    bundle = Bundle(shutil.copytree(body.path, tmp_path / "bundle"))
    file = with_draft_head(bundle, random_draft_head("eagle3", bundle)).path / "head.json"
    content = json.loads(file.read_text())
    (function,) = [f for f in content["functions"] if f["name"] == name]
    (source,) = [i["source"] for i in function["inputs"] if i["source"]["host"] == "tensor"]
    source["name"] = "hidden" if source["name"] == "features" else "features"
    file.write_text(json.dumps(content))
    with pytest.raises(CetaneError, match=f"{name}: a drafter cannot supply"):
        bundle.draft_heads()


def test_rotary_rows_without_their_table(body: Bundle, tmp_path: Path) -> None:
    bundle = Bundle(shutil.copytree(body.path, tmp_path / "bundle"))
    head = with_draft_head(bundle, random_draft_head("eagle3", bundle))
    file = head.path / "head.json"
    content = json.loads(file.read_text())
    del content["files"]["rotary-default.npy"]
    file.write_text(json.dumps(content))
    with pytest.raises(CetaneError, match=r"no rotary-default.npy, whose rows its functions take"):
        bundle.draft_heads()


def test_a_folder_without_its_manifest(path: Path) -> None:
    (head_of(path) / "head.json").unlink()
    with pytest.raises(
        CetaneError, match=r"medusa: no head\.json \(remove the draft head's folder"
    ):
        Bundle(path).draft_heads()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000])
def test_a_manifest_that_is_not_json(path: Path, content: bytes) -> None:
    (head_of(path) / "head.json").write_bytes(content)
    with pytest.raises(CetaneError, match=r"head\.json (is not valid JSON|holds a JSON)"):
        Bundle(path).verify()


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("vocabulary.npy", np.arange(40)),
        ("vocabulary.npy", np.arange(39, dtype=np.int32)),
        ("vocabulary.npy", np.arange(249, 289, dtype=np.int32)),
        ("vocabulary.npy", np.arange(-1, 39, dtype=np.int32)),
        ("vocabulary.npy", np.zeros(40, np.int32)),
        ("held-out.npy", np.zeros((2, 24))),
        ("held-out.npy", np.zeros((0, 24), np.int32)),
        ("held-out.npy", np.zeros((2, 5), np.int32)),
        ("held-out.npy", np.zeros((48), np.int32)),
    ],
)
def test_a_table_that_does_not_fit(path: Path, name: str, array: np.ndarray) -> None:
    np.save(head_of(path) / name, array)
    (head,) = Bundle(path).draft_heads().values()
    with pytest.raises(CetaneError, match=name):
        head.vocabulary() if name == "vocabulary.npy" else head.held_out()


def test_a_package_that_is_not_the_manifests(path: Path) -> None:
    def shrink(content: Any) -> None:
        content["functions"][0]["outputs"][0]["shape"] = [1, 40, 1, 2]

    edit(path, shrink)
    (head,) = Bundle(path).draft_heads().values()
    with pytest.raises(CetaneError, match="draft does not give the logits_out of its plan"):
        open_drafter(head, Bundle(path), open_backend(head, "portable"))


@pytest.mark.parametrize("stopped", ["lowering", "moving the earlier away", "moving it in"])
def test_a_kill_leaves_a_bundle(path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str) -> None:
    """And the next training takes the head's place all the same."""
    bundle = Bundle(path)
    before = bundle.draft_heads()["medusa"].digest
    again = random_draft_head("medusa", bundle, seed=1)

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    rename, calls = Path.rename, []

    def renaming(self: Path, target: Path) -> Any:
        calls.append(target)
        if len(calls) == ("lowering", "moving the earlier away", "moving it in").index(stopped):
            raise Killed
        return rename(self, target)

    with monkeypatch.context() as patch:
        if stopped == "lowering":
            patch.setattr(head_build, "write_json", kill)
        else:
            patch.setattr(head_build.Path, "rename", renaming)
            patch.setattr(head_build.Lowering, "lower", lambda _s, _n, to: to.mkdir())
        with pytest.raises(Killed):
            head_build.add_draft_head(bundle, again, held_out(bundle), NOTHING)
    left = Bundle(path)
    left.verify()
    kept = {head.digest for head in left.draft_heads().values()}
    assert kept == (set() if stopped == "moving it in" else {before})

    after = head_build.add_draft_head(left, again, held_out(left), NOTHING)
    Bundle(path).verify()
    assert after.digest != before
    assert [p.name for p in path.parent.iterdir()] == ["bundle"]


def test_gates_of_a_head(path: Path) -> None:
    """Right weights pass, another head's do not, and a result is about the head that it judged."""
    bundle = Bundle(path)
    (result,) = judge_draft_heads(bundle, lambda *_: None).values()
    assert result.passed, result
    assert [score.arithmetic for score in result.scores] == ["fp16", "fp32"]
    assert all(score.tokens == 2 * 11 * 3 for score in result.scores)
    assert bundle.gates()["golden-medusa"]["passed"]

    other = random_draft_head("medusa", bundle, seed=1)
    head = with_draft_head(bundle, other)
    assert bundle.gates() == {}  # of the head before
    random_draft_head("medusa", bundle, seed=2).save(head.path / "source.safetensors")
    (result,) = judge_draft_heads(relisted(path), lambda *_: None).values()
    assert not result.passed
    assert failed(result) == {
        "tokens that are not the trained ones",
        "constants that are not the trained ones",
        *(f"{what} ({kind})" for what in ("logit cosine", "top-1 agreement", "one logit")
          for kind in ("fp16", "fp32")),
    }  # fmt: skip
    assert Bundle(path).gates()["golden-medusa"]["passed"] is False


def failed(result: DraftHeadResult) -> set[str]:
    return {check.name for check in result.checks if not check.passed}


def relisted(path: Path, **values: Any) -> Bundle:
    """The bundle, with a draft head whose manifest lists what is in it now."""
    head = head_of(path)
    found = {name: record.model_dump() for name, record in records(head, head).items()}
    del found["head.json"]
    edit(path, lambda content: content.update(files=found, **values))
    return Bundle(path)


def test_tokens_that_the_head_did_not_learn(path: Path) -> None:
    """A drafter would propose them in place of the right ones; the logits are the same."""
    file = head_of(path) / "vocabulary.npy"
    tokens = np.load(file)
    absent = np.setdiff1d(np.arange(tokens[-1]), tokens)
    np.save(file, np.sort(np.append(tokens[1:], absent[-1])).astype(np.int32))
    (result,) = judge_draft_heads(relisted(path), lambda *_: None).values()
    assert failed(result) == {"tokens that are not the trained ones"}
    assert not result.passed


def test_positions_that_the_head_did_not_learn(path: Path) -> None:
    """Beyond the windows that the gate reads."""
    head = with_draft_head(Bundle(path), random_draft_head("eagle3", Bundle(path)))
    trained, shards = load_trained(head), tapped_shards(head.plan)
    assert all(check.passed for check in same_interface(head, trained, shards))
    table = np.load(head.path / "rotary-default.npy")
    table[:, 1 + table.shape[1] // 2 :] = table[:, -1:]
    np.save(head.path / "rotary-default.npy", table)
    (wrong,) = (check for check in same_interface(head, trained, shards) if not check.passed)
    assert wrong.name == "rotary tables that are not the trained ones"


def test_one_output_row_is_a_hundredth_too_large(path: Path) -> None:
    """All other logits are right, so the cosine of a row hardly shows it."""
    right, wrong = (random_draft_head("medusa", Bundle(path)) for _ in range(2))
    wrong.output[7] *= 1.01
    head = with_draft_head(Bundle(path), wrong)
    right.save(head.path / "source.safetensors")
    (result,) = judge_draft_heads(relisted(path), lambda *_: None).values()
    assert failed(result) == {"one logit (fp32)", "constants that are not the trained ones"}


@pytest.mark.parametrize("weights", ["fp16", "int8-per-channel"])
@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_one_element_of_a_weight_is_too_large(
    path: Path, kind: DraftHeadKind, weights: str
) -> None:
    """By a hundredth, which no logit shows, or by some codes."""
    right, wrong = (random_draft_head(kind, Bundle(path), weights=weights) for _ in range(2))
    name = next(name for name, own in wrong.state_dict().items() if own.ndim == 2)
    row = wrong.state_dict()[name][5]
    row[row.abs().argsort()[-2]] *= 1.01 if weights == "fp16" else 0.9
    head = with_draft_head(Bundle(path), right)
    assert same_constants(head, load_trained(head)).passed
    head = with_draft_head(Bundle(path), wrong)
    right.save(head.path / "source.safetensors")
    check = same_constants(head, load_trained(head))
    assert (check.name, check.value) == ("constants that are not the trained ones", 1)


@pytest.mark.parametrize("hidden", [0, 3])
def test_the_last_slots_of_its_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, hidden: int
) -> None:
    """No window reaches them from the start of the context."""
    shutil.rmtree(head_of(path))
    forward = EagleLayer.forward

    def blind(layer: EagleLayer, flow: dict[str, Any], memory: Any) -> None:
        mask = flow["mask"]
        context = Bundle(path).plan.recipe.cache.context
        own = mask[..., context:] if mask.shape[-1] > context else mask[..., :0]
        kept = mask[..., : context - hidden]
        lost = torch.full_like(mask[..., context - hidden : context], -4e4)
        seen = flow | {"mask": torch.cat([kept, lost, own], -1)}
        forward(layer, seen, memory)
        flow["hidden"] = seen["hidden"]

    with monkeypatch.context() as patch:
        if hidden:
            patch.setattr(EagleLayer, "forward", blind)
        with_draft_head(Bundle(path), random_draft_head("eagle3", Bundle(path)))
    (result,) = judge_draft_heads(Bundle(path), lambda *_: None).values()
    assert result.passed is not bool(hidden)


@pytest.mark.parametrize("read_is_slow", [False, True])
def test_a_prompt_is_judged_in_every_way(
    path: Path, monkeypatch: pytest.MonkeyPatch, read_is_slow: bool
) -> None:
    """A runner reads a prompt by the function that takes less time. Here `read` is wrong."""
    forward, open_runner = EagleKeys.forward, draft_head.open_runner

    def wrong(block: EagleKeys, flow: dict[str, Any], memory: Any) -> None:
        wide = flow["embedded"].shape[-1] == 8
        forward(block, flow | {"embedded": -flow["embedded"]} if wide else flow, memory)

    def opened(*given: Any) -> Any:
        runner = open_runner(*given)
        if read_is_slow:
            runner.seconds["read"].usual = 1e9
        return runner

    shutil.rmtree(head_of(path))
    with monkeypatch.context() as patch:
        patch.setattr(EagleKeys, "forward", wrong)
        made = with_draft_head(Bundle(path), random_draft_head("eagle3", Bundle(path)))
    assert {f.name: f.tokens for f in made.manifest.functions} == {
        "follow": 3, "read": 8, "draft": 1
    }  # fmt: skip
    monkeypatch.setattr(draft_head, "open_runner", opened)
    (result,) = judge_draft_heads(Bundle(path), lambda *_: None).values()
    assert not result.passed


@pytest.mark.parametrize(("length", "steps"), [(256, 4), (128, 3), (30, 3), (8, 3), (4, 2)])
def test_drafts_up_to_the_end_of_every_window(length: int, steps: int) -> None:
    drafts = [*drafts_of(2, length, steps, 4)]
    for window in range(2):
        own = [draft for draft in drafts if draft.window == window]
        assert own[-1].stop == length - steps and len(own) <= DRAFTS
        assert [one.stop for one in own[:-1]] == [one.start for one in own[1:]]
        assert own[0].start == 0 and all(one.start < one.stop for one in own)


@pytest.mark.parametrize("width", [1, 3, 8, 12])
def test_every_column_of_a_call_gives_logits(width: int) -> None:
    """And every number of accepted tokens is followed, up to one more than a call takes."""
    numbers = {stop - start for _, start, stop in drafts_of(1, 256, 3, width) if start}
    assert numbers >= {*range(1, width + 2)}


def test_hidden_states_that_the_head_did_not_learn(path: Path) -> None:
    """A drafter would read those of the first shard, and the head has learned the last one's."""
    bundle = relisted(path, taps=["chunk-00"])
    (result,) = judge_draft_heads(bundle, lambda *_: None).values()
    assert failed(result) == {"other shards tapped than in training"}


def test_a_trained_head_of_another_shape(path: Path) -> None:
    other = random_draft_head("medusa", Bundle(path), rows=39)
    other.save(head_of(path) / "source.safetensors")
    with pytest.raises(CetaneError, match="trained with rows 39, but the manifest has 40"):
        judge_draft_heads(relisted(path), lambda *_: None)
