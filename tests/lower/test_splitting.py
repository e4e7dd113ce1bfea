"""Contracted axes that are cut in two: the same model, on and off, and off the 1 MiB notch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.gates.residency.shards import ZAYA, ZeroCheckpoint

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.families import Projection
from cetane.hardware import notch
from cetane.hardware.notch import cut, on_notch
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.pipeline.build import build
from cetane.planner import Planner
from cetane.schema.recipe import Recipe, parse_recipe

TOKENS = [int(t) for t in np.random.default_rng(5).integers(1, 288, 19)]
TINY_NOTCH = 768
"""What each core would read of gate, up, down and the head of the tiny model, or a multiple."""
SPLIT = {"lowering": {"split_contracting": True}}


@pytest.mark.parametrize(
    ("outputs", "inputs", "bits", "hit"),
    [
        (4096, 2048, 16, True),  # ZAYA1-8B's first projection of an expert: exactly 1 MiB
        (8192, 2048, 16, True),  # Llama-3.2-1B's gate and up: 2 MiB
        (2048, 8192, 16, True),  # its down: 2 MiB
        (8192, 2048, 8, True),
        (16384, 3072, 8, True),  # Phi-4-mini's gate and up in int8: 3 MiB
        (6144, 1536, 16, False),  # Gemma 4 E2B: 1.125 MiB
        (3072, 1024, 16, False),  # Qwen3-0.6B
        (4096, 2056, 16, True),  # 4 KiB beside: within the margin
        (4096, 2000, 16, False),
        (16, 16, 16, False),  # far below
    ],
)
def test_the_notch(outputs: int, inputs: int, bits: int, hit: bool) -> None:
    """Published examples, by the published formula: ceil(N/16) * D * bytes near k MiB."""
    assert on_notch(outputs, inputs, bits) is hit


@given(st.integers(1, 600), st.integers(1, 600), st.sampled_from([4, 8, 16]))
def test_a_cut_leaves_the_notch(rows: int, columns: int, bits: int) -> None:
    outputs, inputs = rows * 32, columns * 32
    at = cut(outputs, inputs, bits)
    if at is not None:
        assert 0 < at < inputs
        assert not on_notch(outputs, at, bits) and not on_notch(outputs, inputs - at, bits)
    else:
        assert all(
            on_notch(outputs, part, bits) or on_notch(outputs, inputs - part, bits)
            for part in range(32, inputs, 32)
        )


@pytest.mark.parametrize("bias", [False, True])
def test_a_split_projection_is_the_same_product(bias: bool) -> None:
    whole, split = Projection(96, 40, "mlp", bias), Projection(96, 40, "mlp", bias)
    split.split(64)
    weight = torch.randn(40, 96, 1, 1)
    values = {"weight": weight, "first": weight[:, :64], "second": weight[:, 64:]}
    values["bias"] = torch.randn(40)
    for module in (whole, split):
        for name, parameter in module.named_parameters():
            parameter.data = values[name]
    x = torch.randn(1, 96, 1, 5)
    torch.testing.assert_close(split(x), whole(x), rtol=1e-5, atol=1e-5)
    assert [held.columns for held in split.held.values() if held.kind] == [(0, 64), (64, 96)]


@pytest.fixture
def small_notch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notch, "NOTCH", TINY_NOTCH)
    monkeypatch.setattr(notch, "MARGIN", 16)


def logits(bundle: Bundle) -> np.ndarray[Any, Any]:
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    return engine.session().feed(TOKENS, "all")


def convolutions(bundle: Bundle, shard: str) -> int:
    return sum(op.kind == "conv" for op in load(bundle.shard(shard)).functions["decode"].ops)


@pytest.mark.usefixtures("small_notch")
def test_on_and_off(
    recipe: Callable[..., Recipe], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """The same logits to fp32, from packages whose halves are the checkpoint's columns."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    options: dict[str, Any] = {"layout": {"kind": "single"}, "verify": None, "prefill": None}
    bundles = {
        name: build(checkpoint, recipe(**options, **more), tmp_path / name, lambda *_: None)
        for name, more in (("off", {}), ("on", SPLIT))
    }
    off, on = bundles["off"], bundles["on"]
    # Gate, up and down of two layers, and the head.
    assert convolutions(on, "model") == convolutions(off, "model") + 7
    assert on.plan.weight_bytes == off.plan.weight_bytes
    np.testing.assert_allclose(logits(on), logits(off), rtol=0, atol=2e-4)
    on.verify()


@pytest.mark.usefixtures("small_notch")
def test_shards_are_stamped_as_they_are_converted(
    recipe: Callable[..., Recipe], tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """Two layers of one structure, each half encoded on its own."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    wanted = recipe(
        verify=None, prefill=None, layout={"kind": "per-block"},
        compression={"default": "int8-per-channel", "types": {"head": "fp16"}}, **SPLIT,
    )  # fmt: skip
    # In int8 the payloads are half as large.
    notch.NOTCH = TINY_NOTCH // 2
    lowering = Lowering(Planner(checkpoint, wanted), checkpoint)
    for shard in ("layer-00", "layer-01"):
        lowering.lower(shard, tmp_path / f"{shard}.mlpackage")
    lowering.verify("layer-01", tmp_path / "layer-01.mlpackage")
    ops = load(tmp_path / "layer-01.mlpackage").functions["decode"].ops
    assert sum(op.kind == "conv" for op in ops) == 10  # seven, and a second half of three


def test_zaya_at_its_real_size() -> None:
    """The first projection of each of 16 experts is on the notch in fp16, and nothing else is."""

    def hits(**options: Any) -> list[str]:
        wanted = parse_recipe({"name": "r", "layout": {"kind": "per-block"}} | options, "r")
        (block,) = (
            b for b in Planner(ZeroCheckpoint(ZAYA), wanted).model.layers if b.name == "moe-00"
        )
        return [
            path for path, weight in block.weights()
            if weight.kind and on_notch(*weight.shape[:2], 16)
        ]  # fmt: skip

    assert hits() == [f"mlp.experts.{index}.gate_up_proj.weight" for index in range(16)]
    assert hits(**SPLIT) == []


def test_off_by_default() -> None:
    assert parse_recipe({"name": "r"}, "r").lowering.split_contracting is False
