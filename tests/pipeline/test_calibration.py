"""Calibration against transformers' own activations, and what a recipe makes of it."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import build_model, build_tokenizer
from tests.families.gemma_models import build_gemma3

from cetane.checkpoint import open_checkpoint
from cetane.families import options_of
from cetane.pipeline import calibration
from cetane.pipeline.calibration import (
    Calibration,
    calibrate,
    calibration_tokens,
    load_calibration,
    resolve_scale,
)
from cetane.schema.recipe import Recipe, parse_recipe
from cetane.store.settings import using

pytestmark = pytest.mark.usefixtures("own_cache")
FP16_MAX = 65504


def saved(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def recipe(**family: Any) -> Recipe:
    return parse_recipe({"name": "test", "cache": {"context": 64}, "family": family}, "test")


def test_residuals_are_those_of_the_model(tmp_path: Path) -> None:
    model = build_model("llama")
    checkpoint = open_checkpoint(str(saved(model, tmp_path / "model")))
    made = calibrate(checkpoint, recipe())
    tokens = calibration_tokens(checkpoint, 256, 288)
    assert len(tokens) == 256
    with torch.inference_mode():
        hidden = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    assert made.residuals["layer-00"] == pytest.approx(float(hidden[1].abs().max()))
    assert len(made.residuals) == 2


def test_one_pass_serves_every_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    checkpoint = open_checkpoint(str(saved(build_model("llama"), tmp_path / "model")))
    first = calibrate(checkpoint, recipe())
    monkeypatch.setattr(calibration, "reference_of", None)
    again = calibrate(checkpoint, recipe().model_copy(update={"name": "other"}))
    assert again == first
    (file,) = own_cache.glob("store/objects/*/*")
    for wrong in (b"something else", b"[]", b'{"residuals": {"layer-00": "large"}}'):
        file.write_bytes(wrong)
        assert load_calibration(file) is None
    assert load_calibration(file.with_name("missing.json")) is None


def test_two_machines_calibrate_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(str(saved(build_model("llama"), tmp_path / "model")))
    monkeypatch.setattr(calibration.cache_store, "opened", lambda _: nullcontext())
    with using(str(tmp_path / "shared")):
        for largest in (1.0, 1.0000001):
            made = Calibration(residuals={"layer-00": largest})
            monkeypatch.setattr(calibration, "run_pass", lambda *_, made=made: made)
            assert calibrate(checkpoint, recipe()) == made


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(0, 1), (100, 1), (16376, 1), (16377, 1 / 2), (32752, 1 / 2), (65504, 1 / 4),
     (103_795, 1 / 8), (2e6, 1 / 128), (1e30, 2**-12), (float("nan"), 1), (float("inf"), 1)],
)  # fmt: skip
def test_the_scale_is_the_largest_power_of_two_that_fits(largest: float, scale: float) -> None:
    made = Calibration(residuals={"layer-00": largest})
    assert made.residual_scale == scale
    if 16376 < largest < 1e7:
        assert largest * scale <= FP16_MAX / 4 < 2 * largest * scale


def large(model: Any, factor: float) -> Any:
    """The model with a residual stream that leaves fp16 and the same output: what it adds in its
    first layer is larger, and so is every later addition."""
    with torch.no_grad():
        model.model.embed_tokens.weight *= factor
    return model


@pytest.mark.parametrize(
    "build", [build_gemma3, lambda: build_model("llama")], ids=["gemma", "llama"]
)
def test_recipes_get_the_number(build: Any, tmp_path: Path) -> None:
    small = open_checkpoint(str(saved(build(), tmp_path / "small")))
    big = open_checkpoint(str(saved(large(build(), 2.0**18), tmp_path / "big")))
    assert resolve_scale(small, recipe()) == recipe()
    assert resolve_scale(small, recipe(residual_scale="auto")) == recipe()
    resolved = resolve_scale(big, recipe())
    scale = resolved.family["residual_scale"]
    assert scale == 2.0 ** round(np.log2(scale)) < 1
    assert options_of("llama", resolved.family).scale == scale
    assert resolve_scale(big, resolved) == resolved
    assert resolve_scale(big, recipe(residual_scale=0.5)) == recipe(residual_scale=0.5)
