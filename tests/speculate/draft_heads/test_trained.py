"""Draft heads that were trained elsewhere: they compute the same in every bundle of the model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import tiny_recipe
from tests.speculate.draft_head_models import (
    NOTHING,
    STEPS,
    held_out,
    random_draft_head,
    with_draft_head,
)
from tests.speculate.lessons import KINDS, config

from cetane.bundle import Bundle
from cetane.checkpoint import Rotation, open_checkpoint
from cetane.errors import CetaneError
from cetane.pipeline import draft_head
from cetane.pipeline.build import build
from cetane.pipeline.draft_head import add_draft_heads
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import as_recipe_asks
from cetane.speculate.draft_heads import build as build_module
from cetane.speculate.draft_heads.build import add_draft_head
from cetane.speculate.draft_heads.modules import (
    DraftHeadConfig,
    TorchDraftHead,
    load_draft_head,
    make_draft_head,
)
from cetane.speculate.draft_heads.trained import match_to, open_trained, shipped_draft_heads


@pytest.fixture(scope="module")
def origin(tiny_bundle: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with a draft head whose file does not say which blocks it reads."""
    folder = tmp_path_factory.mktemp("origin") / "tiny"
    bundle = Bundle(shutil.copytree(tiny_bundle().path, folder))
    record = NOTHING.model_copy(update={"data": {"book.txt": "ab"}})
    add_draft_head(bundle, random_draft_head("eagle3", bundle), held_out(bundle), record)
    return bundle


def random_lesson(config: DraftHeadConfig) -> tuple[TorchDraftHead, torch.Tensor, torch.Tensor]:
    """A draft head of random weights, with hidden states and embeddings to teach it."""
    head, random = make_draft_head(config), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*head.parameters(), head.output):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
    features = torch.randn(2, 9, 3, config.hidden, generator=random)
    return head, features, torch.randn(2, 9, config.hidden, generator=random)


def test_turned_channels_change_nothing() -> None:
    """Q is made explicit: x Q for every hidden state and embedding."""
    head, features, embedded = random_lesson(config("eagle3", hidden=48))
    q = Rotation(48)(torch.eye(48))
    assert torch.allclose(q @ q.T, torch.eye(48).double(), atol=1e-12)
    with torch.no_grad():
        plain = head.teach(features, embedded)
        head.turn(Rotation(48))
        assert head.config.turned
        moved = head.teach((features.double() @ q).float(), (embedded.double() @ q).float())
        head.turn(Rotation(48), back=True)
        again = head.teach(features, embedded)
    assert not head.config.turned
    for want, *others in zip(plain, moved, again, strict=True):
        assert all(torch.allclose(want, one, rtol=1e-3, atol=1e-3 * want.std()) for one in others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_on_hidden_states_changes_nothing(kind: str) -> None:
    exact = config(kind, hidden=48).model_copy(update={"eps": 1e-12})
    head, features, embedded = random_lesson(exact)
    with torch.no_grad():
        want = head.teach(features, embedded)
        head.rescale(0.25)
        found = head.teach(features / 4, embedded)
        head.rescale(1.0)
        again = head.teach(features, embedded)
    for one, other, third in zip(want, found, again, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-3 * one.std())
        assert torch.equal(one, third)


def test_it_drafts_the_same_in_another_bundle(
    origin: Bundle, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """Of turned channels in fewer bits, where it reads what that bundle hands on."""
    wanted = tiny_recipe(
        compression={"default": "int8-per-channel", "rotate": True}, family={"residual_scale": 0.5}
    )
    checkpoint = as_recipe_asks(open_checkpoint(tiny_checkpoint_folder), wanted)
    bundle = build(checkpoint, wanted, tmp_path / "turned", lambda *_: None)
    (added,) = add_draft_heads(bundle.path, origin.path).heads
    assert added.passed and added.untrained is None and added.held_out == 2
    assert added.head.manifest.training.data == {"book.txt": "ab"}
    before, after = (load_draft_head(b.draft_heads()["eagle3"].path / "source.safetensors")
                     for b in (origin, bundle))  # fmt: skip
    assert after.config.turned and after.config.bundle == bundle.digest != origin.digest
    random = torch.Generator().manual_seed(3)
    features = torch.randn(1, 12, 3, 64, generator=random)
    embedded = torch.randn(1, 12, 64, generator=random)
    turn = Rotation(64)
    want = before.teach(features, embedded)
    found = after.teach(turn(features).float() / 2, turn(embedded).float())
    for one, other in zip(want, found, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.999  # fp16
    # and back: the bundle of plain channels takes it from the turned one
    back = match_to(open_trained(bundle.path)[0], origin, checkpoint_of(origin))
    pairs = zip(back.fuse.weight, before.fuse.weight, strict=True)
    assert min(torch.cosine_similarity(*pair, dim=0) for pair in pairs) > 0.999  # int8


def test_a_file_may_leave_out_the_models_own_rows(
    origin: Bundle, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """In plain and in turned channels it takes the rows of plain ones."""
    folder = loose(origin, tmp_path / "loose", without=("output", "norm"))
    with pytest.raises(CetaneError, match="tensors of other shapes"):
        load_draft_head(folder / "source.safetensors")
    (found,) = open_trained(folder)
    checkpoint = checkpoint_of(origin)
    head = match_to(found, origin, checkpoint)
    name = "lm_head.weight" if "lm_head.weight" in checkpoint else "model.embed_tokens.weight"
    rows = checkpoint.read(name).float()[head.vocabulary]
    assert torch.equal(head.output, rows)
    assert torch.equal(head.norm, checkpoint.read("model.norm.weight").float())
    assert found.draft_head.output.is_meta, "the source is not changed"
    wanted = tiny_recipe(compression={"rotate": True})
    moved = as_recipe_asks(open_checkpoint(tiny_checkpoint_folder), wanted)
    bundle = build(moved, wanted, tmp_path / "turned", lambda *_: None)
    assert torch.equal(match_to(found, bundle, moved).output, rows)


def test_one_that_fails_its_gate_does_not_replace_an_earlier_one(
    origin: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = Bundle(shutil.copytree(origin.path, tmp_path / "bundle"))
    shutil.rmtree(bundle.path / "heads")
    model, judge, reds = checkpoint_of(bundle).source, draft_head.judge_draft_head, []

    def red(*given: Any) -> Any:
        reds.append(judge(*given).model_copy(update={"passed": False}))
        return reds[-1]

    (first,) = add_draft_heads(bundle.path, origin.path, model=model).heads
    before = bundle.draft_heads()["eagle3"].digest
    assert first.placed and first.head.digest == before
    monkeypatch.setattr(draft_head, "judge_draft_head", red)
    monkeypatch.setattr(build_module, "producers", lambda: {"cetane": "another"})
    added = add_draft_heads(bundle.path, origin.path, model=model)
    assert not added.passed and not added.heads[0].placed
    assert reds[0].heads["eagle3"] != before == bundle.draft_heads()["eagle3"].digest
    assert bundle.gates()["golden-eagle3"]["passed"]
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]

    shutil.rmtree(bundle.path / "heads")
    (alone,) = add_draft_heads(bundle.path, origin.path, model=model).heads
    assert alone.placed and not bundle.gates()["golden-eagle3"]["passed"]


def test_a_draft_head_of_before_says_what_it_reads_by_its_bundle(origin: Bundle) -> None:
    (found,) = open_trained(origin.path)
    assert load_draft_head(found.path).config.depths == ()
    assert found.draft_head.config.depths == ("layer-00", "layer-01", "layer-01")
    assert found.draft_head.config.scale == 1.0


def test_a_draft_head_of_before_in_turned_channels_is_refused(
    tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """Nothing says whether it reads turned ones."""
    wanted = tiny_recipe(compression={"rotate": True})
    moved = as_recipe_asks(open_checkpoint(tiny_checkpoint_folder), wanted)
    bundle = build(moved, wanted, tmp_path / "turned", lambda *_: None)
    with_draft_head(bundle, random_draft_head("eagle3", bundle))
    with pytest.raises(CetaneError, match="does not say which channels it reads"):
        open_trained(bundle.path)


def test_medusa_reads_the_last_block_alone(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    source = Bundle(shutil.copytree(tiny_bundle().path, tmp_path / "source"))
    with_draft_head(source, random_draft_head("medusa", source))
    other = tiny_bundle(layout={"kind": "chunks", "chunks": 1})
    assert match_to(open_trained(source.path)[0], other, checkpoint_of(other)).config.depths


def test_the_folder_of_a_bundles_draft_head_is_enough(origin: Bundle, tmp_path: Path) -> None:
    source = origin.draft_heads()["eagle3"]
    folder = shutil.copytree(source.path, tmp_path / "head")
    (found,) = open_trained(folder)
    assert found.training == source.manifest.training and found.held_out.shape == (2, 24)
    (folder / "vocabulary.npy").write_bytes(b"")
    with pytest.raises(CetaneError, match=r"vocabulary\.npy"):
        open_trained(folder)


def test_what_does_not_fit(
    origin: Bundle, tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(
        CetaneError, match=r"no draft head \(give a bundle that has one, the folder"
    ):
        open_trained(tmp_path)
    with pytest.raises(CetaneError, match=r"are in .* already"):
        add_draft_heads(origin.path, origin.path)
    (found,) = open_trained(origin.path)
    other = tiny_bundle(layout={"kind": "chunks", "chunks": 1})
    with pytest.raises(CetaneError, match=r"reads layer-00, layer-01, layer-01, but .* layer-01"):
        match_to(found, other, checkpoint_of(other))
    found.draft_head.vocabulary[-1] = origin.plan.vocab
    with pytest.raises(CetaneError, match=r"head of another model .*\(cetane train-head"):
        match_to(found, origin, checkpoint_of(origin))


def test_one_kind_that_cannot_turn_adds_none(
    origin: Bundle, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    both = Bundle(shutil.copytree(origin.path, tmp_path / "both"))
    with_draft_head(both, random_draft_head("medusa", both))
    wanted = tiny_recipe(compression={"rotate": True})
    moved = as_recipe_asks(open_checkpoint(tiny_checkpoint_folder), wanted)
    bundle = build(moved, wanted, tmp_path / "turned", lambda *_: None)
    with pytest.raises(CetaneError, match="a medusa head cannot move between plain and turned"):
        add_draft_heads(bundle.path, both.path)
    assert not bundle.draft_heads()


def break_vocabulary(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vocabulary"][:2] = tensors["vocabulary"][[1, 0]]


def negate(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vocabulary"][0] = -1


def make_float(tensors: dict[str, torch.Tensor]) -> None:
    tensors["vocabulary"] = tensors["vocabulary"].float()


def make_tiny(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fuse.weight"] = tensors["fuse.weight"].to(torch.float8_e4m3fn)


def make_whole(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fuse.weight"] = tensors["fuse.weight"].to(torch.int8)


def lose_a_number(tensors: dict[str, torch.Tensor]) -> None:
    tensors["norm_mlp.weight"][3] = torch.nan


def lose_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["qkv.weight"]


@pytest.mark.parametrize(
    "damage",
    [break_vocabulary, negate, make_float, make_whole, make_tiny, lose_a_number, lose_a_tensor],
)  # fmt: skip
def test_a_strangers_weights(
    origin: Bundle, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    folder = loose(origin, tmp_path / "loose", change=damage)
    with pytest.raises(CetaneError, match="not a draft head: "):
        open_trained(folder)


def test_a_strangers_folder(origin: Bundle, tmp_path: Path) -> None:
    folder = loose(origin, tmp_path / "loose")
    np.save(folder / "held-out.npy", np.zeros((2, 2 * STEPS - 1), np.int32))
    with pytest.raises(CetaneError, match="windows of a wrong shape"):
        open_trained(folder)
    longer = np.lib.format.open_memmap(  # with holes, so it takes no space
        folder / "held-out.npy", "w+", np.int32, (16, 2**20 + 1)
    )
    del longer
    with pytest.raises(CetaneError, match="windows of a wrong shape"):
        open_trained(folder)
    np.save(folder / "held-out.npy", np.zeros((200, 24), np.int32))
    assert open_trained(folder)[0].held_out.shape == (16, 24)
    training = json.loads((folder / "training.json").read_text())
    for shares in ([float("nan")], [1e308], [0.5] * 17):
        (folder / "training.json").write_text(json.dumps(training | {"top1": shares}))
        with pytest.raises(CetaneError, match=r"training\.json.*top1"):
            open_trained(folder)
    (folder / "training.json").write_text("{}")
    with pytest.raises(CetaneError, match=r"training\.json"):
        open_trained(folder)
    linked = loose(origin, tmp_path / "linked")
    (linked / "held-out.npy").unlink()
    (linked / "held-out.npy").symlink_to(folder / "held-out.npy")
    with pytest.raises(CetaneError, match=r"held-out\.npy"):
        open_trained(linked)
    changed = Bundle(shutil.copytree(origin.path, tmp_path / "changed"))
    (changed.path / "heads/eagle3/held-out.npy").write_bytes(b"")
    with pytest.raises(CetaneError, match=r"held-out\.npy"):
        open_trained(changed.path)


def test_what_comes_with_cetane(
    tmp_path: Path, origin: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    (found,) = open_trained("smollm2-135m-instruct")
    assert shipped_draft_heads().keys() == {"smollm2-135m-instruct"}
    assert found.draft_head.config.depths == ("layer-09", "layer-19", "layer-29")
    assert found.held_out.shape == (8, 256) and found.draft_head.output.is_meta
    monkeypatch.chdir(tmp_path)
    shutil.copytree(origin.path, tmp_path / "smollm2-135m-instruct")
    (own,) = open_trained("smollm2-135m-instruct")
    assert own.draft_head.config.hidden == 64, "a bundle wins"
    shutil.rmtree(tmp_path / "smollm2-135m-instruct")
    (tmp_path / "smollm2-135m-instruct").mkdir()  # such as its checkpoint
    assert open_trained("smollm2-135m-instruct")[0].draft_head.config.hidden == 576


def loose(
    origin: Bundle,
    folder: Path,
    without: tuple[str, ...] = (),
    change: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
) -> Path:
    """The draft head of a bundle in a folder of its own."""
    (found,) = open_trained(origin.path)
    folder.mkdir()
    tensors = {n: t for n, t in load_file(found.path).items() if n not in without}
    change(tensors)
    about = found.draft_head.config.model_dump_json()
    save_file(tensors, folder / "source.safetensors", {"cetane": about})
    shutil.copy(found.path.with_name("held-out.npy"), folder)
    (folder / "training.json").write_text(found.training.model_dump_json())
    return folder
