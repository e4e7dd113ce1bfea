"""What a finished package computes: the exact executor beside transformers and the authored torch.

The weights of the truth are rounded to fp16 as a package holds them, so fp32 arithmetic must agree
to fp32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.lower.half_weights import HalfWeights, cosines, half_logits_of

from cetane.bundle import Bundle
from cetane.bundle.tables import Tables
from cetane.checkpoint import open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend, ReferenceProgram
from cetane.lower.lower import Lowering
from cetane.mil import load
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

TOKENS = [int(t) for t in np.random.default_rng(5).integers(1, 288, 43)]
"""Past the prefill width five times over, and not a multiple of any width."""


class ExactBackend(PortableBackend):
    """The reference executor, whatever the program."""

    def open(self, shard: str) -> ReferenceProgram:
        return ReferenceProgram(load(self.packages.shard(shard)), self.arithmetic)


class PackageBackend:
    """The exact executor on packages that are in no bundle."""

    name, dtype, by_rows = "package", np.float32, False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, shard: str) -> ReferenceProgram:
        return ReferenceProgram(load(self.folder / f"{shard}.mlpackage"), "fp32")


def half_logits(model: transformers.PreTrainedModel) -> np.ndarray:
    """transformers' logits with weights rounded to fp16, in fp32."""
    return half_logits_of(model, TOKENS)


@pytest.fixture(scope="module")
def truth(tiny_checkpoint_folder: Path) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    )
    return half_logits(model)


def logits(bundle: Bundle, backend: Any) -> np.ndarray:
    engine = Engine(bundle.plan, backend, bundle.tables())
    found = engine.session().feed(TOKENS, "all")
    assert found is not None
    return found


def test_fp32_is_transformers(variant: Bundle, truth: np.ndarray) -> None:
    found = logits(variant, ExactBackend(variant))
    np.testing.assert_allclose(found, truth, atol=3e-5 * np.abs(truth).max(), rtol=0)


def test_fp32_is_the_authored_torch(variant: Bundle, tiny_checkpoint_folder: Path) -> None:
    weights = HalfWeights(open_checkpoint(tiny_checkpoint_folder))
    engine = authored_engine(Planner(weights, variant.plan.recipe), weights)
    authored = engine.session().feed(TOKENS, "all")
    assert authored is not None
    found = logits(variant, ExactBackend(variant))
    np.testing.assert_allclose(found, authored, atol=3e-5 * np.abs(authored).max(), rtol=0)


def test_fp16_is_close(variant: Bundle, truth: np.ndarray) -> None:
    """Close, and not fp32 by another name."""
    found = logits(variant, ExactBackend(variant, "fp16"))
    assert cosines(found, truth).min() > 0.9999
    assert np.abs(found - truth).max() > 1e-5 * np.abs(truth).max()


def test_single_tokens_are_the_same_as_calls_of_many(variant: Bundle, truth: np.ndarray) -> None:
    engine = Engine(variant.plan, ExactBackend(variant), variant.tables(), ["decode"])
    found = engine.session().feed(TOKENS, "all")
    np.testing.assert_allclose(found, truth, atol=3e-5 * np.abs(truth).max(), rtol=0)


@pytest.mark.parametrize(
    ("family", "config", "shapes"),
    [
        ("qwen2", {"tie_word_embeddings": True}, "range"),
        ("qwen3", {}, "static"),
        ("mistral", {"sliding_window": 12}, "static"),
        ("mistral", {"sliding_window": 12}, "range"),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}, "range"),
    ],
)
def test_families(
    family: str,
    config: dict[str, Any],
    shapes: str,
    tiny_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
) -> None:
    """What their configs add, lowered: biases, norms of queries and keys, windows, tied heads."""
    model = tiny_model(family, num_hidden_layers=1, **config)
    expected = half_logits(model)
    checkpoint = in_memory(model)
    planner = Planner(
        checkpoint, recipe(shapes=shapes, verify=None, layout={"kind": "single"}, context=64)
    )
    Lowering(planner, checkpoint).lower("model", tmp_path / "model.mlpackage")
    tables: Tables = authored_engine(planner, checkpoint).tables
    found = Engine(planner.plan(), PackageBackend(tmp_path), tables).session().feed(TOKENS, "all")
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max(), rtol=0)
