"""A bundle of fitted constants: made once, and held to what they are of."""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import build_model, build_tokenizer
from tests.families.matrix_models import QWEN_NEXT

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.compress import parse_format
from cetane.compress.fitted import folder
from cetane.compress.recipe_file import TextFile
from cetane.errors import CetaneError
from cetane.files import claimed, silent
from cetane.fitting import fit as module
from cetane.fitting import human_text
from cetane.fitting import lessons as lessons_module
from cetane.fitting.human_text import windows_of
from cetane.fitting.own_text import TextWriter
from cetane.fitting.tune import Tuner
from cetane.gates.port import packaged
from cetane.gates.reference import Reference
from cetane.gates.weights import wrong_constants
from cetane.pipeline.build import build
from cetane.pipeline.calibration import resolve_fitted
from cetane.pipeline.compression_choice import resolve_recipe
from cetane.pipeline.request import Request, make_request
from cetane.planner import Encoder, Planner, as_recipe_asks
from cetane.schema.recipe import Recipe, parse_recipe


def recipe(**compression: Any) -> Recipe:
    return parse_recipe(
        {
            "name": "fitted",
            "cache": {"context": 64},
            "tokens": {"verify": 0, "prefill": 0},
            "layout": {"kind": "single", "head": "last"},
            "compression": {"default": "palette3-kmeans-group8",
                            "types": {"head": "int8-per-channel"}} | compression,
        },
        "recipe",
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def little_text() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SEQUENCES", 12)
        patch.setattr(module, "READ", 4)
        patch.setattr(lessons_module, "SEQUENCES", 6)
        patch.setattr(lessons_module, "READ", 2)
        patch.setattr(human_text, "LENGTH", 32)
        yield


@dataclass
class Fixed:
    checkpoint: Checkpoint
    bundle: Bundle

    def wrong(self) -> list[str]:
        planner = Planner(self.checkpoint, self.bundle.plan.recipe)
        port = packaged(self.bundle, planner, self.checkpoint)
        return [w.problem for name in planner.members
                for w in wrong_constants(port, self.checkpoint, name)]  # fmt: skip


@pytest.fixture(scope="module")
def fitted(tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Fixed:
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    target = tmp_path_factory.mktemp("fitted") / "bundle"
    return Fixed(checkpoint, build(checkpoint, recipe(method="gptq"), target, lambda *_: None))


def test_the_constants_are_those_of_the_file(fitted: Fixed) -> None:
    compression = fitted.bundle.plan.recipe.compression
    assert compression.method == "gptq"
    assert compression.fitted is not None
    names = {name.rpartition("/")[0] for name in compression.fitted.read().names}
    assert "model.layers.1.mlp.down_proj.weight" in names
    assert len(names) == 2 * 7, "all projections of two layers, and not the head"
    assert fitted.wrong() == []


def test_the_file_says_what_every_weight_costs(fitted: Fixed) -> None:
    file = fitted.bundle.plan.recipe.compression.fitted
    assert file is not None
    harms = file.read().harms
    assert len(harms) == 2 * 7 and min(harms.values()) > 0


def test_other_options_are_other_constants(fitted: Fixed) -> None:
    other = resolve_recipe(
        fitted.checkpoint, recipe(method="gptq", second_order={"damping": 0.5, "order": "given"})
    )
    assert differs(other, fitted)


def differs(other: Recipe, fitted: Fixed) -> bool:
    """Whether any constant has other values than the bundle's: a short tuning changes few."""
    files = other.compression.fitted, fitted.bundle.plan.recipe.compression.fitted
    one, two = (file.read() for file in files if file is not None)
    assert one.names == two.names
    return any(
        not np.array_equal(one.file.get_tensor(name), two.file.get_tensor(name))
        for name in one.names
    )


def test_another_text_makes_other_constants(fitted: Fixed, tmp_path: Path) -> None:
    """A user's text is read in place of documentation."""
    text = tmp_path / "ours.txt"
    text.write_text("a fuel ignites. " * 400, encoding="utf-8")
    assert differs(resolve_recipe(fitted.checkpoint, reading(text)), fitted)


def test_constants_of_another_model_are_refused(
    fitted: Fixed, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """Weights that were trained a little further are near enough to pass for the same ones."""
    folder = tmp_path / "trained on"
    shutil.copytree(tiny_checkpoint_folder, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    same, other = fitted.bundle.plan.recipe, open_checkpoint(folder)
    assert resolve_fitted(fitted.checkpoint, same) == same
    with pytest.raises(
        CetaneError, match=r"compression\.fitted: .* another model than .*trained on"
    ):
        resolve_fitted(other, same)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [({"compression.method": "tuned"}, False), ({"compression": {}}, False),
     ({"cache.context": 32}, True)],
)  # fmt: skip
def test_constants_of_another_compression_are_not_taken(
    changes: dict[str, Any], kept: bool, fitted: Fixed, tiny_checkpoint_folder: Path
) -> None:
    asked = make_request(tiny_checkpoint_folder, fitted.bundle.plan.recipe, changes=changes)
    assert (asked.recipe.compression.fitted is not None) == kept


def test_another_python_has_another_documentation(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its constants are others, but a text of the user's is the same everywhere."""
    planner = Planner(fitted.checkpoint, recipe(method="gptq"))
    formats, compression = module.fitted_formats(planner), planner.recipe.compression
    own = compression.model_copy(update={"text": TextFile(file="ours.txt", sha256="0" * 64)})
    keys = [module.key_of(fitted.checkpoint, formats, one) for one in (compression, own)]
    monkeypatch.setattr(module, "EDITION", "3.99.0")
    others = [module.key_of(fitted.checkpoint, formats, one) for one in (compression, own)]
    assert others[0] != keys[0] and others[1] == keys[1]


def test_a_cache_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    fitted: Fixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Fitter", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CetaneError, match=r"cannot write .*file/fitted"):
        resolve_recipe(fitted.checkpoint, recipe(method="gptq"))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.0.input_layernorm.weight",
     "model.layers.1.mlp.down_proj.weight"],
)  # fmt: skip
def test_a_damaged_weight_is_named_before_the_model_is_loaded(
    name: str, rotate: bool, tiny_checkpoint_folder: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A turned model has a norm's NaN in the projections that read it, which are not damaged."""
    monkeypatch.setattr(module, "Fitter", lambda *_: pytest.fail("the model was loaded"))
    damaged = shutil.copytree(tiny_checkpoint_folder, tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    tensors[name].view(-1)[3] = np.nan if "norm" in name else np.inf
    save_file(tensors, damaged / "model.safetensors", {"format": "pt"})
    wanted = recipe(method="gptq", rotate=rotate)
    with pytest.raises(CetaneError, match=rf"^{name} holds NaN or infinity"):
        resolve_fitted(as_recipe_asks(open_checkpoint(damaged), wanted), wanted)


def test_a_text_is_encoded_once(
    fitted: Fixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan reads it, then what comes before the fitting, then the fitting."""
    text, encoded = tmp_path / "ours.txt", []
    text.write_text("a fuel ignites. " * 401, encoding="utf-8")

    def count(texts: list[str], *others: Any) -> torch.Tensor:
        encoded.append(texts)
        return windows_of(texts, *others)

    monkeypatch.setattr(human_text, "windows_of", count)
    planner = Request(fitted.checkpoint, reading(text)).planner
    human_text.check_text(fitted.checkpoint, planner)
    read = human_text.human_text(fitted.checkpoint, planner)
    assert len(read) >= human_text.LEAST and len(encoded) == 1


def test_too_short_a_text_is_refused_before_the_model_is_loaded(
    fitted: Fixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Fitter", lambda *_: pytest.fail("the model was loaded"))
    text = tmp_path / "ours.txt"
    text.write_text("a fuel ignites.", encoding="utf-8")
    too_short = r"windows of 32 tokens \(give a text of 8 windows"
    with pytest.raises(CetaneError, match=too_short):
        resolve_recipe(fitted.checkpoint, reading(text))
    with pytest.raises(CetaneError, match=too_short):
        assert Request(fitted.checkpoint, reading(text)).planner


def reading(text: Path) -> Recipe:
    """A recipe that names a text."""
    named = TextFile.of(text)
    made = recipe(method="gptq", text=named.model_dump())
    made.compression.find_as(named)
    return made


@pytest.mark.parametrize("default", ["int8-per-channel", "palette8-kmeans-group8"])
def test_a_method_without_a_format_to_fit(fitted: Fixed, default: str) -> None:
    with pytest.raises(CetaneError, match=r'"gptq" fits palettes and int4 .* no weight has such'):
        resolve_recipe(fitted.checkpoint, recipe(method="gptq", default=default))


def test_a_model_that_is_too_large_is_not_rounded_first(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", 1)
    monkeypatch.setattr(module.Fitter, "rounded", None)
    for own in ({"second_order": {"damping": 0.3}}, {"mix_to": 3.5, "minutes": 1.0}):
        with pytest.raises(CetaneError, match="too many to learn here"):
            resolve_recipe(fitted.checkpoint, recipe(method="tuned", **own))


def test_the_text_is_read_once_for_all_formats(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "importance", None)
    monkeypatch.setattr(TextWriter, "write", None)
    other = recipe(method="gptq", default="palette4-kmeans-group8")
    costs, before = (
        resolve_recipe(fitted.checkpoint, made).compression.fitted.read().harms  # type: ignore[union-attr]
        for made in (other, fitted.bundle.plan.recipe)
    )
    assert all(costs[name] < before[name] for name in costs), "four bits cost less than three"


def test_little_effort_reads_a_fifth_and_no_importance(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def watch(rounder: Any, model: Any, names: Any, text: Any, *others: Any) -> None:
        read.append(len(text))
        run(rounder, model, names, text, *others)

    run = module.Rounder.run
    monkeypatch.setattr(module.Rounder, "run", watch)
    monkeypatch.setattr(module, "importance", None)
    made = recipe(method="gptq", second_order={"effort": "quick"})
    quick = resolve_recipe(fitted.checkpoint, made).compression.fitted
    whole = fitted.bundle.plan.recipe.compression.fitted
    assert read == [2 + 1], "a fifth of 12 sequences and of 4 windows"
    assert quick is not None and whole is not None and quick.sha256 != whole.sha256


def test_importance_from_the_cache_makes_the_same_file(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fit that was stopped and goes on has the hash of one that was not."""
    made = fitted.bundle.plan.recipe.compression.fitted
    assert made is not None
    cache = shutil.copytree(os.environ["CETANE_CACHE"], tmp_path / "cache")
    monkeypatch.setenv("CETANE_CACHE", str(cache))
    (folder() / f"{made.sha256}.safetensors").unlink()
    monkeypatch.setattr(module, "importance", None)  # it is found
    again = resolve_recipe(fitted.checkpoint, recipe(method="gptq")).compression.fitted
    assert again is not None and again.path.is_file()
    assert again.sha256 == made.sha256


STREAMING: dict[str, Any] = {
    "sinks": 1,
    "window": 4,
    "scores": {
        "source": "", "model_type": "", "method": "mass", "settings": {},
        "layers": [[0.1, 0.9], [0.2, 0.3]],
    },
}  # fmt: skip
"""Head 1 of both layers keeps all tokens, so heads change places."""


@pytest.mark.parametrize("rotate", [False, True])
def test_heads_that_stream_are_fitted_as_they_stream(
    rotate: bool, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """The model that layers are rounded in is the one that is built; so are its constants."""
    wanted = recipe(method="gptq", rotate=rotate)
    cache = {"context": 64, "streaming": STREAMING}
    wanted = parse_recipe(wanted.model_dump() | {"cache": cache}, "recipe")
    checkpoint = as_recipe_asks(open_checkpoint(tiny_checkpoint_folder), wanted)
    planner = Planner(checkpoint, wanted)
    tokens = torch.randint(0, 288, (2, 32))
    with torch.no_grad():
        own = module.Fitter(checkpoint, planner, silent).model(tokens).logits
        expected = Reference(checkpoint).model(tokens).logits
        plain = Reference(open_checkpoint(tiny_checkpoint_folder)).model(tokens).logits
    torch.testing.assert_close(own, expected, rtol=0, atol=1e-4)
    assert (own - plain).abs().max() > 0.1
    if not rotate:
        return  # one bundle is enough: with channels turned too
    made = build(checkpoint, wanted, tmp_path / "bundle", silent)
    assert made.plan.recipe.compression.fitted is not None
    assert Fixed(checkpoint, made).wrong() == []


@pytest.mark.parametrize("method", ["gptq", "tuned"])
def test_rows_in_another_order_are_fitted_built_and_held_to_the_checkpoint(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A family that stores queries beside gates, head by head: with their file, and without it."""
    build_model("qwen3_5_text", **QWEN_NEXT["qwen3_5_text"]).save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    wanted = recipe(method=method, minutes=1 / 60)
    made = Fixed(checkpoint, build(checkpoint, wanted, tmp_path / "bundle", silent))
    file = made.bundle.plan.recipe.compression.fitted
    assert file is not None
    for part in ("q_proj", "gate_proj"):
        assert f"model.layers.1.self_attn.q_proj.weight.{part}" in file.read().harms
    assert made.wrong() == []
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "empty"))
    assert made.wrong() == []
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda name: read(name).roll(8 * ("q_proj" in name), 0))
    assert len(made.wrong()) == 2, "queries that read the gates' rows, and gates the queries'"


def test_transposed_matrices_are_fitted_built_and_held_to_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """GPT-2 keeps them so, and its queries, keys and values side by side."""
    build_model("gpt2").save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    made = Fixed(checkpoint, build(checkpoint, recipe(method="gptq"), tmp_path / "bundle", silent))
    file = made.bundle.plan.recipe.compression.fitted
    assert file is not None
    fitted = {"attn.c_attn.weight.k_proj", "attn.c_proj.weight.c_proj", "mlp.c_fc.weight.c_fc"}
    assert {f"transformer.h.1.{name}" for name in fitted} < file.read().harms.keys()
    assert made.wrong() == []
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "empty"))
    assert made.wrong() == []
    read = checkpoint.read
    exchanged = "c_attn.weight"
    monkeypatch.setattr(
        checkpoint, "read", lambda name: read(name).roll(64 * name.endswith(exchanged), -1)
    )
    assert len(made.wrong()) == 6, "queries read keys, keys values, and values queries"


def test_they_are_made_once(fitted: Fixed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Fitter", None)
    again = resolve_recipe(fitted.checkpoint, recipe(method="gptq"))
    assert again.compression == fitted.bundle.plan.recipe.compression


def test_a_copy_of_the_checkpoint_has_them_already(
    fitted: Fixed, tiny_checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are of its content, wherever it lies and whenever it was written."""
    copy = shutil.copytree(tiny_checkpoint_folder, tmp_path / "copy", copy_function=shutil.copy)
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setattr(module, "Fitter", None)
    again = resolve_recipe(open_checkpoint(copy), recipe(method="gptq"))
    assert again.compression == fitted.bundle.plan.recipe.compression


def test_without_the_file_they_are_held_to_the_checkpoint(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another matrix's constants are refused, and those that were fitted to this one are not."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    assert fitted.wrong() == []
    other = Swapped(fitted.checkpoint)
    problems = Fixed(other, fitted.bundle).wrong()  # type: ignore[arg-type]
    assert len(problems) == 2
    assert all("times what they need to" in problem for problem in problems)


def test_vectors_are_fitted_built_and_held_to_the_checkpoint(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Palettes of pairs, rounded and tuned; with their file, and without it."""
    wanted = recipe(method="tuned", minutes=1 / 60, default="palette3-kmeans-vector2-per-tensor")
    made = Fixed(fitted.checkpoint, build(fitted.checkpoint, wanted, tmp_path / "b", silent))
    file = made.bundle.plan.recipe.compression.fitted
    assert file is not None
    fitted_names = {name.rpartition("/")[0] for name in file.read().names}
    assert len(fitted_names) == 2 * 7, "all projections of two layers"
    assert made.wrong() == []
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "empty"))
    assert made.wrong() == []
    other = Swapped(fitted.checkpoint)
    assert len(Fixed(other, made.bundle).wrong()) == 2  # type: ignore[arg-type]


def test_constants_of_another_file_are_refused(fitted: Fixed) -> None:
    """With the file, every bit counts: one entry of a palette that is off is found."""
    planner = Planner(fitted.checkpoint, fitted.bundle.plan.recipe)
    encoder = Encoder(fitted.checkpoint, fitted.bundle.plan.recipe.compression)
    weight = next(w for b in planner.blocks for _, w in b.weights() if w.kind)
    assert encoder.is_fitted(weight)
    values = weight.read(fitted.checkpoint).numpy()
    assert not np.array_equal(encoder(weight).decode(), recipe_plain(weight, values))


@pytest.mark.parametrize("scale", [0.25, 0.3])
@pytest.mark.parametrize("default", ["palette3-kmeans-group8", "int4-per-channel"])
def test_a_scaled_residual_stream_has_the_same_constants_times_the_scale(
    default: str, scale: float, fitted: Fixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is added to the stream is scaled; the model is the same, and so is what fits it."""
    whole = resolve_recipe(fitted.checkpoint, recipe(method="gptq", default=default))
    own = whole.model_copy(update={"family": {"residual_scale": scale}})
    made = Fixed(fitted.checkpoint, build(fitted.checkpoint, own, tmp_path / "b", silent))
    encoder = Encoder(fitted.checkpoint, whole.compression)
    before = {w.name: w for b in Planner(fitted.checkpoint, whole).blocks for _, w in b.weights()}
    writers = 0
    for _, weight in (w for b in Planner(fitted.checkpoint, own).blocks for w in b.weights()):
        if weight.kind in (None, "head"):
            continue
        assert encoder.is_fitted(weight)
        scales = weight.name.endswith(("o_proj.weight", "down_proj.weight"))
        wanted = (scale if scales else 1) * encoder(before[weight.name]).decode().astype(float)
        np.testing.assert_allclose(encoder(weight).decode(), wanted, rtol=2e-3, atol=1e-6)
        writers += scales
    assert writers == 2 * 2
    assert made.wrong() == []
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "empty"))
    assert made.wrong() == []


def test_a_factor_that_leaves_fp16_names_the_weight(fitted: Fixed) -> None:
    planner = Planner(fitted.checkpoint, fitted.bundle.plan.recipe)
    encoder = Encoder(fitted.checkpoint, planner.recipe.compression)
    weight = next(w for b in planner.blocks for _, w in b.weights() if w.kind)
    with pytest.raises(CetaneError, match=rf"^{weight.name}: .* not finite in fp16"):
        encoder(replace(weight, factor=1e6))


def recipe_plain(weight: Any, values: np.ndarray) -> np.ndarray:
    form = recipe().compression.format_for(weight.name, weight.kind)
    return form.encode(values).decode()


def test_nothing_is_encoded_before_it_is_fitted(fitted: Fixed) -> None:
    with pytest.raises(CetaneError, match="nothing is fitted yet"):
        Encoder(fitted.checkpoint, recipe(method="gptq").compression)


def test_tuning_goes_on_from_there(fitted: Fixed) -> None:
    steps: list[str] = []
    tuned = resolve_recipe(
        fitted.checkpoint,
        recipe(method="tuned", minutes=1 / 60),
        lambda what, *_: steps.append(what),
    )
    assert any(step.startswith("tuning, KL") for step in steps)
    file = tuned.compression.fitted
    assert file is not None
    assert file.read().names == fitted.bundle.plan.recipe.compression.fitted.read().names  # type: ignore[union-attr]
    assert file.read().harms == fitted.bundle.plan.recipe.compression.fitted.read().harms  # type: ignore[union-attr]
    (told,) = [step for step in steps if step.startswith("tuned, KL on text kept aside")]
    before, after = (float(figure) for figure in told.split()[-3::2])
    if before - after > 1e-4:  # else the first constants are kept
        assert differs(tuned, fitted)
    assert not list(folder().glob("*.tuning"))


def test_a_second_tuning_of_the_same_is_told_to_wait(fitted: Fixed) -> None:
    """Another folder would not help: the constants are kept by their content."""
    wanted = recipe(method="tuned", minutes=1 / 30)
    planner = Planner(fitted.checkpoint, wanted)
    key = module.key_of(fitted.checkpoint, module.fitted_formats(planner), wanted.compression)
    with (
        claimed(folder() / f"{key}.tuning", "tuning"),
        pytest.raises(CetaneError, match=r"by process .*its constants will be used again"),
    ):
        resolve_recipe(fitted.checkpoint, wanted)


def test_a_weight_that_learnt_too_much_keeps_what_was_rounded(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate would refuse it. What the others learnt stays."""
    far, near = (f"model.layers.0.mlp.{part}_proj.weight" for part in ("up", "down"))

    def learn(tuner: Tuner, _minutes: float) -> bool:
        tuner.student.weights[far].levels *= 9
        tuner.student.weights[near].levels *= 1.01
        return True

    monkeypatch.setattr(Tuner, "run", learn)
    tuned = resolve_recipe(fitted.checkpoint, recipe(method="tuned", minutes=1 / 40))
    file, first = (one.compression.fitted for one in (tuned, fitted.bundle.plan.recipe))
    assert file is not None and first is not None
    form = parse_format("palette3-kmeans-group8")
    for name, factor in ((far, 1.0), (near, 1.01)):
        shape = tuple(fitted.checkpoint.read(name).shape)
        now, before = (f.read().of(name, shape, form, None, None) for f in (file, first))
        assert now is not None and before is not None
        np.testing.assert_allclose(now.decode(), factor * before.decode(), rtol=2e-3)


def test_what_is_interrupted_writes_no_more_text(
    fitted: Fixed, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []

    def written(_fitter: Any, most: float) -> Any:
        seconds.append(most)
        raise KeyboardInterrupt

    monkeypatch.setattr(module.Fitter, "lessons", written)
    fitter = module.Fitter.__new__(module.Fitter)
    fitter.model = torch.nn.Module()
    partial = folder() / "any.tuning"
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fitter.tuned(None, {}, 3.0, partial)  # type: ignore[arg-type]
        partial.touch()
    partial.unlink()
    assert seconds == [60, 0]


class Swapped:
    """A checkpoint two of whose matrices are exchanged."""

    PAIR = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self.checkpoint, name)

    def __contains__(self, name: object) -> bool:
        return name in self.checkpoint

    def read(self, name: str) -> Any:
        if name in self.PAIR:
            name = self.PAIR[1 - self.PAIR.index(name)]
        return self.checkpoint.read(name)
