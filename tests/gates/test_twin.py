"""A twin computes with the numbers that fp16 rounded, wherever it is clear which they were."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import build_model, build_tokenizer, tiny_recipe
from tests.families.matrix_models import DELTA_LAYERS

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.engine import Engine
from cetane.gates import twin
from cetane.gates.port import Packaged, packaged
from cetane.gates.twin import Unrounded, rounded
from cetane.lower.tracing import SMALLEST_FP16
from cetane.mil import load
from cetane.mil.index import FunctionIndex
from cetane.mil.program import Body, MilFunction, NamedValue, Op, StoredConstant, TensorType
from cetane.pipeline.build import build
from cetane.planner import Planner

from .conftest import with_ops


def function(norms: int = 0, **scalars: float) -> MilFunction:
    """Constants of fp16, by name. The first ones are the epsilons of norms."""
    half = TensorType((), "fp16")
    consts = [
        Op("const", name, {"val": (StoredConstant(half, lambda v=value: np.float16(v)),)},
           (NamedValue(name, half),))
        for name, value in scalars.items()
    ]  # fmt: skip
    normed = [Op("layer_norm", f"n_{a}", {"epsilon": (a,)}, ()) for a in list(scalars)[:norms]]
    return MilFunction("main", {}, {}, {}, Body((), (*consts, *normed), ()))


@pytest.mark.parametrize("number", [1e-6, 24**-0.5, 1e-12, 0.5, -1 / 3])
def test_a_rounded_number_is_the_number_again(number: float) -> None:
    held = max(np.float16(number), np.float16(SMALLEST_FP16)) if number > 0 else np.float16(number)
    exact = Unrounded([number, 7.0]).substitutes(function(scale=float(held)))
    assert exact["scale"].read() == np.float32(number)


def test_another_number_stays() -> None:
    """As one that a wrong graph has, or one that two numbers may have been."""
    numbers = Unrounded([0.25, 1e-12, 3e-12])
    assert numbers.substitutes(function(wrong=0.26, unclear=SMALLEST_FP16)) == {}


def test_norms_tell_their_epsilons_apart_by_order() -> None:
    """Both are `SMALLEST_FP16` in fp16. A wrong one stays."""
    own = {"main": [1e-8, 6.25e-8, 3e-9, 1e-8]}
    numbers = Unrounded(own["main"], own)
    smallest = {"first": SMALLEST_FP16, "second": SMALLEST_FP16, "third": SMALLEST_FP16}
    exact = numbers.substitutes(function(4, **smallest, wrong=2e-7, factor=SMALLEST_FP16))
    read = {name: float(one.read()) for name, one in exact.items()}
    assert read == {
        "first": np.float32(1e-8),
        "second": np.float32(6.25e-8),
        "third": np.float32(3e-9),
    }


def test_another_count_of_norms_has_no_order() -> None:
    numbers = Unrounded([1e-8, 6.25e-8], {"main": [1e-8, 6.25e-8]})
    assert numbers.substitutes(function(1, first=SMALLEST_FP16)) == {}


def test_nothing_but_zero_is_below_the_smallest() -> None:
    assert rounded(1e-30) == SMALLEST_FP16 == float(np.nextafter(np.float16(0), np.float16(1)))
    assert rounded(0.0) == 0
    assert rounded(1e6) == np.inf


@pytest.mark.parametrize(("back", "undone"), [(0.25, {"b": ("x",)}), (0.5, {})])
def test_only_a_pair_of_one_scale_rounds(back: float, undone: dict[str, Any]) -> None:
    """With two scales, it changes what it rounds."""
    plain = function(there=0.25, back=back)
    half = TensorType((4,), "fp16")
    pair = (
        Op("quantize", "a", {"input": ("x",), "scale": ("there",)}, (NamedValue("a", half),)),
        Op("dequantize", "b", {"input": ("a",), "scale": ("back",)}, (NamedValue("b", half),)),
    )
    rounding = replace(plain, body=replace(plain.body, ops=(*plain.ops, *pair)))
    assert twin.unrounded_activations(FunctionIndex(rounding)) == undone


def test_a_twin_of_a_scaled_delta_rule(tmp_path: Path) -> None:
    """Its epsilons for keys of 128 channels and for a stream of a quarter are one number in fp16.
    Small rows of the embedding make both matter."""
    model = build_model("qwen3_5_text", **(DELTA_LAYERS | {"linear_key_head_dim": 128}))
    with torch.no_grad():
        model.model.embed_tokens.weight *= 1e-2
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    recipe = tiny_recipe(verify=None, layout={"kind": "single"}, family={"residual_scale": 0.25})
    bundle = build(checkpoint, recipe, tmp_path / "bundle", lambda *_: None)
    planner = Planner(checkpoint, bundle.plan.recipe)
    port = Packaged(bundle, planner, checkpoint, bundle.tables(), bundle.tokenizer)
    ids = list(range(5, 25))
    with torch.no_grad():
        truth = model(torch.tensor([ids])).logits[0].numpy()
    logits = port.twin.session().feed(ids, "all")
    np.testing.assert_allclose(logits, truth, atol=1e-4 * np.abs(truth).max())


def test_a_twin_rounds_no_keys_and_values(
    codes: Bundle,
    checkpoint: Checkpoint,
    truth: transformers.PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its logits are the model's, though the port keeps caches of 8 bits; the port's are not. What
    the port rounds besides, the twin rounds too."""
    port = packaged(codes, Planner(checkpoint, codes.plan.recipe), checkpoint)
    ids = list(range(5, 45))
    with torch.no_grad():
        logits = truth(torch.tensor([ids])).logits[0, 20:].numpy()

    def error(engine: Engine) -> float:
        session = engine.session()
        session.feed(ids[:20], "none")
        rows = [session.feed([ids[20]], "all"), session.feed(ids[21:], "all")]
        return float(np.abs(np.concatenate(rows) - logits).max())

    assert error(port.twin) < 1e-4 < 1e-3 < error(port.shipped)
    monkeypatch.setattr(twin, "load", lambda path: with_ops(load(path), rounding_gates))
    assert error(port.twin) > 1e-2


def rounding_gates(op: Op) -> list[Op]:
    """The op; whole numbers in place of what a SiLU gives."""
    if op.kind != "silu":
        return [op]
    (value,) = op.outputs
    raw = replace(value, name=f"{value.name}_raw")
    return [replace(op, outputs=(raw,)), Op("round", raw.name, {"x": (raw.name,)}, (value,))]
