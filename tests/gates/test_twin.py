"""A twin computes with the numbers that fp16 rounded, wherever it is clear which they were."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.gates.port import Packaged
from cetane.gates.twin import Unrounded, rounded
from cetane.lower.tracing import SMALLEST_FP16
from cetane.mil.program import Body, MilFunction, NamedValue, Op, StoredConstant, TensorType
from cetane.planner import Planner


def function(**scalars: float) -> MilFunction:
    """Constants of fp16, by name."""
    half = TensorType((), "fp16")
    ops = tuple(
        Op("const", name, {"val": (StoredConstant(half, lambda v=value: np.float16(v)),)},
           (NamedValue(name, half),))
        for name, value in scalars.items()
    )  # fmt: skip
    return MilFunction("main", {}, {}, {}, Body((), ops, ()))


@pytest.mark.parametrize("number", [1e-6, 24**-0.5, 1e-12, 0.5, -1 / 3])
def test_a_rounded_number_is_the_number_again(number: float) -> None:
    held = max(np.float16(number), np.float16(SMALLEST_FP16)) if number > 0 else np.float16(number)
    exact = Unrounded([number, 7.0]).substitutes(function(scale=float(held)))
    assert exact["scale"].read() == np.float32(number)


def test_another_number_stays() -> None:
    """As one that a wrong graph has, or one that two numbers may have been."""
    numbers = Unrounded([0.25, 1e-12, 3e-12])
    assert numbers.substitutes(function(wrong=0.26, unclear=SMALLEST_FP16)) == {}


def test_nothing_but_zero_is_below_the_smallest() -> None:
    assert rounded(1e-30) == SMALLEST_FP16 == float(np.nextafter(np.float16(0), np.float16(1)))
    assert rounded(0.0) == 0
    assert rounded(1e6) == np.inf


def test_a_twin_rounds_no_keys_and_values(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path
) -> None:
    """Its logits are the model's, though the port keeps caches of 8 bits; the port's are not."""
    bundle = tiny_bundle(
        cache={"context": 64, "format": "int8"},
        target={"deployment": "iOS26"},
        layout={"kind": "single"},
    )
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    planner = Planner(checkpoint, bundle.plan.recipe)
    port = Packaged(bundle, planner, checkpoint, bundle.tables(), bundle.tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    )
    ids = list(range(5, 45))
    with torch.no_grad():
        truth = model(torch.tensor([ids])).logits[0, 20:].numpy()
    errors = []
    for engine in (port.twin, port.shipped):
        session = engine.session()
        session.feed(ids[:20], "none")
        rows = [session.feed([ids[20]], "all"), session.feed(ids[21:], "all")]
        errors.append(float(np.abs(np.concatenate(rows) - truth).max()))
    assert errors[0] < 1e-4 < 1e-3 < errors[1]
