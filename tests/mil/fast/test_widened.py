"""Attention over caches of 8 bits: the rewrites that widen them, and the tape's instruction."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.mil.conftest import build_program, ct, mb

from cetane.bundle import Bundle
from cetane.mil import Executable, load
from cetane.mil.fast.context import ATTENTION, WIDENED
from cetane.mil.fast.fusion import fuse
from cetane.mil.fast.tape.model import TapeModel
from cetane.mil.fast.translate import live_ops
from cetane.mil.program import Program

HEADS, WIDTH, SLOTS, NEW = 2, 8, 40, 3


def test_both_products_of_every_layer(tiny_bundle: Callable[..., Bundle]) -> None:
    """Attention reads what is widened where its own mask shows it; no scale is left for scores."""
    bundle = tiny_bundle(
        cache={"context": 64, "format": "int8"},
        target={"deployment": "iOS26"},
        layout={"kind": "single"},
    )
    for function in load(bundle.shard("model")).functions.values():
        ops = live_ops(fuse(function, pack=True))
        attentions = [op for op in ops if op.kind == ATTENTION]
        widened = {op.outputs[0].name: op for op in ops if op.kind == WIDENED}
        assert len(attentions) == 2 and len(widened) == 4
        for op in attentions:
            for part in ("keys", "values"):
                assert widened[str(op.inputs[part][0])].inputs["mask"] == op.inputs["mask"]
        assert not any(op.kind in ("cast", "softmax", "matmul") for op in ops)


def scores_of(scaled: str) -> Callable[..., Any]:
    """Scores of queries and a cache of 8 bits. The scales are those of its slots, or of others."""

    def body(rows: Any, new: Any, codes: Any, scales: Any, more: Any) -> Any:
        past = mb.cast(x=mb.slice_by_index(x=codes, begin=[1, 0, 0, 0], end=[2, *CACHE]),
                       dtype="fp16")  # fmt: skip
        own = mb.slice_by_index(x=scales, begin=[1, 0, 0, 0], end=[2, HEADS, 1, SLOTS])
        keys = mb.concat(values=[past, new], axis=-1)
        factors = mb.concat(values=[own, more], axis=-1)
        scores = mb.matmul(x=rows, y=keys)
        if scaled == "other":
            factors = mb.relu(x=factors)
        return mb.mul(x=scores, y=factors)

    return body


CACHE = (HEADS, WIDTH, SLOTS)
INPUTS = {
    "rows": ((1, HEADS, 5, WIDTH), "fp16"),
    "new": ((1, HEADS, WIDTH, NEW), "fp16"),
    "codes": ((2, *CACHE), "int8"),
    "scales": ((2, HEADS, 1, SLOTS), "fp16"),
    "more": ((1, HEADS, 1, NEW), "fp16"),
}


@pytest.mark.parametrize("scaled", ["own", "other"])
def test_scores(scaled: str, tmp_path: Path) -> None:
    """A tape gives what the reference gives and numpy computes, whether a rewrite fits or not."""
    model = ct.convert(
        build_program(INPUTS, scores_of(scaled), {}, ct.target.iOS26),
        minimum_deployment_target=ct.target.iOS26,
        pass_pipeline=ct.PassPipeline.EMPTY,
        skip_model_load=True,
    )
    model.save(str(tmp_path / "scores.mlpackage"))
    program: Program = load(tmp_path / "scores.mlpackage")
    function = program.functions["main"]
    kinds = {op.kind for op in live_ops(fuse(function, pack=True))}
    assert (WIDENED in kinds) == (scaled == "own")
    draw = np.random.default_rng(3)
    given = {
        name: draw.integers(-127, 128, shape).astype(np.int8)
        if dtype == "int8"
        else draw.uniform(0.1, 2, shape).astype(np.float16).astype(np.float32)
        for name, (shape, dtype) in INPUTS.items()
    }
    keys = np.concatenate([given["codes"][1:].astype(np.float64), given["new"]], -1)
    factors = np.concatenate([given["scales"][1:], given["more"]], -1)
    expected = given["rows"] @ keys * factors
    (name,) = function.outputs
    tape = TapeModel(program).function("main")
    np.testing.assert_allclose(tape(given)[name], expected, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(Executable(function)(given)[name], expected, rtol=1e-5, atol=1e-3)
