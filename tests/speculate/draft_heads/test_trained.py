"""Draft heads that were trained elsewhere: they compute the same in every bundle of the model."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.conftest import tiny_recipe
from tests.speculate.draft_head_models import STEPS, random_draft_head, with_draft_head
from tests.speculate.lessons import KINDS, config

from cetane.bundle import Bundle
from cetane.checkpoint import Turn, open_checkpoint
from cetane.errors import CetaneError
from cetane.pipeline.build import build
from cetane.pipeline.draft_head import add_draft_heads
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import turned
from cetane.speculate.draft_heads.modules import load_draft_head, make_draft_head
from cetane.speculate.draft_heads.trained import fit_to, open_trained, shipped


@pytest.fixture(scope="module")
def origin(tiny_bundle: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle with a draft head that says which blocks it reads."""
    folder = tmp_path_factory.mktemp("origin") / "tiny"
    bundle = Bundle(shutil.copytree(tiny_bundle().path, folder))
    head = random_draft_head("eagle3", bundle)
    head.config = head.config.model_copy(update={"depths": ("layer-00", "layer-01", "layer-01")})
    with_draft_head(bundle, head)
    return bundle


def test_turned_channels_change_nothing() -> None:
    """Q is made explicit: x Q for every hidden state and embedding."""
    head = make_draft_head(config("eagle3", hidden=48))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in head.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        head.output.copy_(torch.randn(head.output.shape, generator=random))
    features = torch.randn(2, 9, 3, 48, generator=random)
    embedded = torch.randn(2, 9, 48, generator=random)
    q = Turn(48)(torch.eye(48))
    assert torch.allclose(q @ q.T, torch.eye(48).double(), atol=1e-12)
    with torch.no_grad():
        plain = head.teach(features, embedded)
        head.turn(Turn(48))
        assert head.config.turned
        moved = head.teach((features.double() @ q).float(), (embedded.double() @ q).float())
        head.turn(Turn(48), back=True)
        again = head.teach(features, embedded)
    assert not head.config.turned
    for want, *others in zip(plain, moved, again, strict=True):
        assert all(torch.allclose(want, one, rtol=1e-3, atol=1e-3 * want.std()) for one in others)


@pytest.mark.parametrize("kind", KINDS)
def test_a_factor_on_hidden_states_changes_nothing(kind: str) -> None:
    head = make_draft_head(config(kind, hidden=48).model_copy(update={"eps": 1e-12}))
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in head.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        head.output.copy_(torch.randn(head.output.shape, generator=random))
        features = torch.randn(2, 9, 3, 48, generator=random)
        embedded = torch.randn(2, 9, 48, generator=random)
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
    checkpoint = turned(open_checkpoint(tiny_checkpoint_folder), wanted)
    bundle = build(checkpoint, wanted, tmp_path / "turned", lambda *_: None)
    (added,) = add_draft_heads(bundle.path, origin.path).heads
    assert added.passed and added.windows == 0 and added.held_out == 2
    assert added.head.manifest.training.data.keys() == {"source.safetensors"}
    before, after = (load_draft_head(b.draft_heads()["eagle3"].path / "source.safetensors")
                     for b in (origin, bundle))  # fmt: skip
    assert after.config.turned and after.config.bundle == bundle.digest != origin.digest
    random = torch.Generator().manual_seed(3)
    features = torch.randn(1, 12, 3, 64, generator=random)
    embedded = torch.randn(1, 12, 64, generator=random)
    turn = Turn(64)
    want = before.teach(features, embedded)
    found = after.teach(turn(features).float() / 2, turn(embedded).float())
    for one, other in zip(want, found, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.999  # fp16
    # and back: the bundle of plain channels takes it from the turned one
    back = fit_to(open_trained(bundle.path)[0], origin, checkpoint_of(origin))
    pairs = zip(back.fuse.weight, before.fuse.weight, strict=True)
    assert min(torch.cosine_similarity(*pair, dim=0) for pair in pairs) > 0.999  # int8


def test_a_file_may_leave_out_the_models_own_rows(origin: Bundle, tmp_path: Path) -> None:
    source = origin.draft_heads()["eagle3"].path
    tensors = load_file(source / "source.safetensors")
    rows, gains = tensors.pop("output"), tensors.pop("norm")
    with safe_open(source / "source.safetensors", "pt") as file:
        about = file.metadata()
    save_file(tensors, tmp_path / "source.safetensors", about)
    shutil.copy(source / "held-out.npy", tmp_path)
    with pytest.raises(CetaneError, match="tensors of other shapes"):
        load_draft_head(tmp_path / "source.safetensors")
    checkpoint = checkpoint_of(origin)
    head = fit_to(open_trained(tmp_path)[0], origin, checkpoint)
    table = checkpoint.read("lm_head.weight" if "lm_head.weight" in checkpoint
                            else "model.embed_tokens.weight")  # fmt: skip
    assert torch.equal(head.output, table.float()[head.vocabulary])
    assert torch.equal(head.norm, checkpoint.read("model.norm.weight").float())
    assert rows.shape == head.output.shape and gains.shape == head.norm.shape


def test_what_does_not_fit(
    origin: Bundle, tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    with pytest.raises(CetaneError, match=r"no draft head \(give a bundle that has one, or a name"):
        open_trained(tmp_path)
    other = tiny_bundle(layout={"kind": "chunks", "chunks": 1})
    with pytest.raises(CetaneError, match=r"reads layer-00, layer-01, layer-01, but .* layer-01"):
        fit_to(open_trained(origin.path)[0], other, checkpoint_of(other))
    (found,) = open_trained(origin.path)
    found.draft_head.vocabulary[0] = -1
    with pytest.raises(CetaneError, match="the draft head of another model"):
        fit_to(found, origin, checkpoint_of(origin))
    folder = shutil.copytree(origin.draft_heads()["eagle3"].path, tmp_path / "short")
    np.save(folder / "held-out.npy", np.zeros((2, 2 * STEPS - 1), np.int32))
    with pytest.raises(CetaneError, match="windows of a wrong shape"):
        open_trained(folder)
    with pytest.raises(CetaneError, match="the kind medusa cannot be turned"):
        make_draft_head(config("medusa")).turn(Turn(16))


def test_what_comes_with_cetane() -> None:
    (found,) = open_trained("smollm2-135m-instruct")
    assert shipped().keys() == {"smollm2-135m-instruct"}
    assert found.draft_head.config.depths == ("layer-09", "layer-19", "layer-29")
    assert found.held_out.shape == (8, 256) and found.draft_head.output.is_meta
