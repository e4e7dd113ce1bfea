"""Bundles whose experts are fitted: nearer to the model than plain rounding, and gates agree."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import build_model
from tests.fitting.test_experts import MODELS
from tests.fitting.test_fit import Fixed, recipe
from torch import Tensor

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.files import silent
from cetane.fitting import fit as module
from cetane.fitting import human_text
from cetane.pipeline.build import build
from cetane.pipeline.calibration import resolve_fitted
from cetane.pipeline.compression_choice import resolve_recipe
from cetane.pipeline.fitted_mixes import FittedMixes
from cetane.planner import Encoder, Planner
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe

FORM = "palette3-kmeans-group8"


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEQUENCES", 48)
        patch.setattr(module, "READ", 24)
        patch.setattr(human_text, "LENGTH", 32)
        yield


@pytest.fixture(scope="module")
def folders(
    tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Hugging Face folders of random models, some of whose channels are large."""
    made = {}
    for name in ("mixtral", "olmoe", "qwen3_moe", "zaya"):
        kind, config = MODELS[name]
        folder = made[name] = tmp_path_factory.mktemp(name)
        shutil.copytree(tiny_checkpoint_folder, folder, dirs_exist_ok=True)
        (folder / "model.safetensors").unlink()
        model = build_model(kind, **config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 3 and parameter.shape[1] > 1:
                    parameter *= 2  # so that experts matter
            model.model.embed_tokens.weight[:, ::7] *= 4
        model.save_pretrained(folder)
    return made


def kl_of_hugging_face(checkpoint: Checkpoint, recipe: Recipe, fitted: bool) -> float:
    """Mean KL of transformers' model whose experts alone are rounded, fitted or plainly."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint.source).eval()
    tokens = torch.randint(0, 288, (16, 32), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        truth = model(tokens).logits.log_softmax(-1)
        encoder, tensors = Encoder(checkpoint, recipe.compression), dict(model.named_parameters())
        for block in Planner(checkpoint, recipe).blocks:
            for _, weight in block.weights():
                if weight.of_experts:
                    part = tensors[weight.name][slice(*weight.rows)]
                    view: Tensor = weight.pick(part) if weight.pick else part[0]
                    form = recipe.compression.format_for(weight.name, "experts")
                    values = view.contiguous().numpy()
                    made = encoder(weight) if fitted else form.encode(values)
                    view.copy_(torch.from_numpy(made.decode().reshape(view.shape)).float())
        changed = model(tokens).logits.log_softmax(-1)
    return float((truth.exp() * (truth - changed)).sum(-1).mean())


@pytest.mark.parametrize(
    ("name", "bits"), [("mixtral", 4), ("olmoe", 3), ("qwen3_moe", 2), ("zaya", 4), ("zaya", 2)]
)
def test_fitted_experts_are_nearer_to_the_model(
    name: str, bits: int, folders: dict[str, Path]
) -> None:
    checkpoint = open_checkpoint(folders[name])
    asked = recipe(method="gptq", default=f"palette{bits}-kmeans-group8")
    made = resolve_recipe(checkpoint, asked)
    fitted, plain = (kl_of_hugging_face(checkpoint, made, own) for own in (True, False))
    assert fitted < 0.9 * plain


@pytest.fixture(scope="module")
def fitted(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Fixed:
    """Two experts are one set of matrices, and the residual stream is scaled."""
    checkpoint = open_checkpoint(folders["mixtral"])
    own = {"family": {"together": 2, "residual_scale": 2**-3}}
    asked = override(recipe(method="gptq"), own)
    target = tmp_path_factory.mktemp("fitted") / "bundle"
    return Fixed(checkpoint, build(checkpoint, asked, target, silent))


def test_the_constants_are_those_of_the_file(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the file, and held to the checkpoint without it."""
    file = fitted.bundle.plan.recipe.compression.fitted
    assert file is not None
    expected = {
        f"model.layers.{layer}.mlp.experts.{tensor}_proj[{first}:{first + 2}].{part}_proj"
        for layer in (0, 1)
        for first in (0, 2)
        for tensor, part in (("gate_up", "gate"), ("gate_up", "up"), ("down", "down"))
    }
    assert expected < {name.rpartition("/")[0] for name in file.read().names}
    assert fitted.wrong() == []
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    assert fitted.wrong() == []


def test_nothing_is_told_where_all_is_fitted(fitted: Fixed) -> None:
    assert "compression.method" not in fitted.bundle.plan.recipe.reasons


def test_the_share_that_is_rounded_plainly_is_told(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZAYA's convolutions; and the last product of experts that are too many together."""
    zaya = resolve_recipe(open_checkpoint(folders["zaya"]), recipe(method="gptq"))
    assert zaya.reasons["compression.method"].endswith("rounded plainly: convolution")
    monkeypatch.setattr("cetane.planner.encoding.LARGEST_INPUTS", 100)
    checkpoint = open_checkpoint(folders["mixtral"])
    asked = override(recipe(method="gptq"), {"family.together": 2})
    made = resolve_recipe(checkpoint, asked)
    experts, others = 2 * 4 * 3 * 64 * 96, 2 * (2 * 64 * 64 + 2 * 64 * 32)
    share = experts / 3 / (experts + others + 288 * 64)
    told = f"{share:.0%} of the weights are rounded plainly: experts"
    assert made.reasons["compression.method"] == told


def test_a_mix_gives_experts_more_bits(folders: dict[str, Path]) -> None:
    """What their rounding costs is predicted, as of all other weights."""
    checkpoint = open_checkpoint(folders["mixtral"])
    made = resolve_fitted(checkpoint, recipe(method="gptq", mix_to=4.5))
    mixes = FittedMixes(Planner(checkpoint, made))
    mix = mixes.best(4.5)
    assert mix is not None and any("experts" in name for name in mix.names(FORM))


def test_experts_learn(folders: dict[str, Path]) -> None:
    """Their constants change, and serve transformers' model better than those they began with."""
    checkpoint = open_checkpoint(folders["mixtral"])
    asked = {"types": {"experts": "palette2-kmeans-group8"}, "default": "fp16"}
    learnt = resolve_recipe(checkpoint, recipe(method="tuned", minutes=1 / 5, **asked))
    begun = resolve_recipe(checkpoint, recipe(method="gptq", **asked))
    assert learnt.compression.fitted is not None and begun.compression.fitted is not None
    one, two = learnt.compression.fitted.read(), begun.compression.fitted.read()
    assert one.names == two.names
    assert any(not np.array_equal(one.file.get_tensor(name), two.file.get_tensor(name))
               for name in one.names if ".experts." in name)  # fmt: skip
    after, before = (kl_of_hugging_face(checkpoint, made, True) for made in (learnt, begun))
    assert after < before


def test_a_model_that_is_not_in_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's experts are read, rounded and given back."""
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", 1)
    checkpoint = open_checkpoint(folders["olmoe"])
    made = resolve_recipe(checkpoint, recipe(method="gptq", second_order={"damping": 0.02}))
    assert "compression.method" not in made.reasons, "all is fitted"
    assert made.compression.fitted is not None
    fitted, plain = (kl_of_hugging_face(checkpoint, made, own) for own in (True, False))
    assert fitted < 0.9 * plain
