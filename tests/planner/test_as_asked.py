"""Turned checkpoints compute what transformers computes on the original weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.config_parts import MULTIPLIERS
from tests.families.gemma_models import build_gemma3, build_gemma4
from tests.families.matrix_models import build_falcon, build_hybrid
from tests.families.parity import FEEDS, assert_close, truth

from cetane.checkpoint import RotatedCheckpoint, Rotation, open_checkpoint
from cetane.checkpoint.rotated import hartley
from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.gates.reference import Reference
from cetane.planner import Planner, as_recipe_asks, can_rotate
from cetane.schema.recipe import parse_recipe

TURNED = parse_recipe(
    {
        "name": "turned",
        "cache": {"context": 32},
        "tokens": {"verify": 4, "prefill": 16},
        "compression": {"rotate": True},
    },
    "turned",
)
MODELS: dict[str, Any] = {
    "llama": lambda: build_model("llama"),
    "llama with biases": lambda: build_model("llama", attention_bias=True, mlp_bias=True),
    "untied": lambda: build_model("llama", tie_word_embeddings=False),
    "qwen2": lambda: build_model("qwen2"),
    "qwen3": lambda: build_model("qwen3"),
    "phi3": lambda: build_model("phi3"),
    "granite": lambda: build_model("granite", **MULTIPLIERS),
    "arcee": lambda: build_model("arcee", attention_bias=True, mlp_bias=True),
    "ernie": lambda: build_model("ernie4_5", use_bias=True),
    "hunyuan": lambda: build_model("hunyuan_v1_dense"),
    "hyperclovax": lambda: build_model("hyperclovax", **MULTIPLIERS),
    "exaone": lambda: build_model("exaone4", num_hidden_layers=4, sliding_window=6),
    "glm": lambda: build_model("glm"),
    "glm4": lambda: build_model("glm4"),
    "olmo2": lambda: build_model("olmo2"),
    "lfm2": lambda: build_model(
        "lfm2", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"]
    ),
    "lfm3": lambda: build_model(
        "lfm3", num_hidden_layers=3, layer_types=["conv", "full_attention", "sliding_attention"]
    ),
    "lfm3 without norms after": lambda: build_model(
        "lfm3", layer_types=["conv", "full_attention"], use_sandwich_norm=False
    ),
    "granite hybrid": lambda: build_hybrid("dense", mamba_proj_bias=True),
    "falcon": lambda: build_falcon(mamba_n_groups=2, projectors_bias=True),
    "gemma3": build_gemma3,
}
STREAMS = set(MODELS) - {"exaone", "gemma3", "glm4", "hyperclovax", "lfm3", "olmo2"}
"""Models without norms after attention and MLP: their residual stream turns too."""


def unlike(model: Any) -> Any:
    """Gains that are not one, so that a lost one shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
    return model


def checkpoint_of(model: Any) -> InMemoryCheckpoint:
    checkpoint = InMemoryCheckpoint(model)
    checkpoint.tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    return checkpoint


@pytest.mark.parametrize("name", MODELS)
def test_a_turned_model_computes_the_same(name: str) -> None:
    model = unlike(MODELS[name]())
    checkpoint = as_recipe_asks(checkpoint_of(model), TURNED)
    assert isinstance(checkpoint, RotatedCheckpoint)
    assert (checkpoint.stream is not None) == (name in STREAMS)
    changed = [n for n in checkpoint.base.names()
               if not torch.equal(checkpoint.read(n), checkpoint.base.read(n).float())]  # fmt: skip
    assert any("v_proj" in n or "qkv_proj" in n for n in changed)
    engine = authored_engine(Planner(checkpoint, TURNED), checkpoint)
    assert_close(engine, truth(model), {k: FEEDS[k] for k in ("prefill", "uneven")})


def test_a_turned_head_of_its_own_is_the_head(tmp_path: Path) -> None:
    """Released LFM2s tie it under another name, which wins over `tie_word_embeddings`."""
    model = unlike(MODELS["lfm2"]())
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_embedding": True}))
    checkpoint = as_recipe_asks(open_checkpoint(tmp_path), TURNED)
    engine = authored_engine(Planner(checkpoint, TURNED), checkpoint)
    assert_close(engine, truth(model), {"uneven": FEEDS["uneven"]})


def test_what_cannot_turn_is_refused() -> None:
    checkpoint = checkpoint_of(build_gemma4())
    assert not can_rotate(checkpoint, TURNED)
    with pytest.raises(CetaneError, match="nothing of a gemma4_text can be turned"):
        as_recipe_asks(checkpoint, TURNED)


def test_a_recipe_that_turns_needs_a_turned_checkpoint() -> None:
    with pytest.raises(CetaneError, match="channels are not turned"):
        Planner(checkpoint_of(build_model("llama")), TURNED)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 16, 24, 36, 576])
def test_a_turn_is_orthogonal_and_goes_back(size: int) -> None:
    turn = Rotation(size)
    matrix = turn(torch.eye(size)).numpy()
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-12)
    x = torch.randn(3, 2 * size)
    np.testing.assert_allclose(turn(turn(x), back=True).numpy(), x.double().numpy(), atol=1e-12)
    by_hand = np.concatenate([x[:, :size].double() @ matrix, x[:, size:].double() @ matrix], 1)
    np.testing.assert_allclose(turn(x).numpy(), by_hand, atol=1e-12)
    np.testing.assert_allclose(turn(x.T, axis=0).numpy(), by_hand.T, atol=1e-12)


def test_outliers_spread() -> None:
    x = torch.zeros(1, 576)
    x[0, 7] = 100
    assert turned_peak(x) < 100 / 576**0.5 * 2


def turned_peak(x: torch.Tensor) -> float:
    return float(Rotation(576)(x).abs().max())


def test_the_hartley_matrix_is_its_own_inverse() -> None:
    matrix = hartley(9).numpy()
    np.testing.assert_allclose(matrix @ matrix, np.eye(9), atol=1e-14)


def test_rows_are_the_rows_of_the_whole() -> None:
    checkpoint = as_recipe_asks(checkpoint_of(unlike(build_model("llama"))), TURNED)
    for name in checkpoint.names():
        whole = checkpoint.read(name)
        assert tuple(whole.shape) == tuple(checkpoint.shape(name))
        torch.testing.assert_close(checkpoint.read_rows(name, 1, 5), whole[1:5], atol=0, rtol=0)


def test_the_reference_is_the_original_model_in_the_turned_basis() -> None:
    model = unlike(build_model("llama"))
    checkpoint = as_recipe_asks(checkpoint_of(model), TURNED)
    assert isinstance(checkpoint, RotatedCheckpoint) and checkpoint.stream is not None
    layer = ("model.layers.0", 0)
    plain, seen = (
        Reference(one).run([[1, 2, 3]], [layer])[0] for one in (checkpoint.base, checkpoint)
    )
    np.testing.assert_array_equal(plain.logits, seen.logits)
    expected = checkpoint.stream(torch.from_numpy(plain.tensors[layer])).numpy()
    np.testing.assert_allclose(seen.tensors[layer], expected, atol=1e-6)
    last = Reference(checkpoint)
    hidden = last.tensors([1, 2, 3], [("model.layers.1", 0)])[("model.layers.1", 0)]
    np.testing.assert_allclose(last.head(hidden, "model.norm"), plain.logits, atol=1e-5)
