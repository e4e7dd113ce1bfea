"""The sentence names the true cause."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.converting import converted_once

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates.explain import Explanation, explain
from cetane.gates.golden import Proof, golden
from cetane.pipeline.build import build

from .broken import BROKEN, Broken
from .conftest import changed
from .mutations.families import recipe
from .mutations.ports import AuthoredPort
from .test_mutations import model


def told(bundle: Bundle, checkpoint: Checkpoint) -> Explanation | None:
    return explain(bundle, checkpoint, golden(bundle, checkpoint, lambda *_: None, prompts=0))


def test_a_right_port_needs_no_sentence(good: Bundle, checkpoint: Checkpoint) -> None:
    assert told(good, checkpoint) is None


def test_wrong_weights(bad: Bundle, checkpoint: Checkpoint) -> None:
    explanation = told(bad, checkpoint)
    assert explanation is not None
    assert explanation.cause == "weights"
    assert "model.layers.1.mlp.down_proj.weight" in explanation.sentence


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_the_cause(broken: Broken, asked: Callable[..., None]) -> None:
    """Of ports of authored modules, which need no conversion; on little text."""
    asked("evidence", positions=48, most=48)
    checkpoint, reference = model(broken.family)
    with broken.at_work():
        port = AuthoredPort(checkpoint, recipe(broken.form, **broken.recipe))
        broken.change(port)
        proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
        explanation = explain(port, checkpoint, proof.run(prompts=0, greedy_tokens=0))  # type: ignore[arg-type]
    assert explanation is not None
    assert explanation.cause == broken.cause, explanation.sentence
    assert broken.says in explanation.sentence
    assert explanation.recipe_change == broken.mends


def test_a_stream_that_leaves_fp16(
    good: Bundle, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """The package is right, and fp16 is too narrow for what it computes."""

    def grow(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.0.mlp.down_proj.weight"] *= 1e5

    loud = open_checkpoint(changed(tiny_checkpoint_folder, tmp_path / "loud", grow))
    with converted_once():
        bundle = build(loud, good.plan.recipe, tmp_path / "bundle", lambda *_: None)
    explanation = told(bundle, loud)
    assert explanation is not None
    assert explanation.cause == "fp16 range"
    assert "layer-00" in explanation.sentence
    assert (explanation.recipe_change or "").startswith("[family]\nresidual_scale = 0.0")
