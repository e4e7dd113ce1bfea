"""Mamba of 2023 equals transformers at every position: states and histories, no caches."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.conftest import InMemoryCheckpoint
from tests.families.matrix_models import SCANS, build_mamba2, build_scan
from tests.families.parity import FEEDS, assert_parity, cuts
from tests.families.recipes import recipe

from cetane.checkpoint import open_checkpoint
from cetane.families.selective_scan import scanned
from cetane.planner import Planner

UNEVEN = {"uneven": FEEDS["uneven"]}


@pytest.mark.parametrize("kind", SCANS)
def test_models(kind: str) -> None:
    assert_parity(build_scan(kind), recipe("readonly", "chunks", slices=3), FEEDS, drafts=True)


@pytest.mark.parametrize("kind", SCANS)
@pytest.mark.parametrize(
    "change",
    [
        {"use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
        {"expand": 1, "state_size": 3, "conv_kernel": 1, "time_step_rank": 7},
        {"hidden_act": "gelu", "layer_norm_epsilon": 0.1},
    ],
)
def test_relatives(kind: str, change: dict[str, Any]) -> None:
    assert_parity(build_scan(kind, **change), recipe(), UNEVEN)


@pytest.mark.parametrize("order", ["c1t", "ct1"])
def test_a_scaled_residual_stream_is_the_same_model(order: str) -> None:
    scaled = recipe("blend", "per-block", order=order, family={"residual_scale": 2**-5})
    assert_parity(build_scan("mamba"), scaled, UNEVEN, drafts=True)


def test_a_context_costs_no_memory() -> None:
    planner = Planner(InMemoryCheckpoint(build_scan("mamba")), recipe())
    assert planner.plan().caches == {}
    assert planner.model.max_context == 2**20


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
def test_a_scan_is_its_recurrence(tokens: int) -> None:
    rng = np.random.default_rng(0)
    decays, added = rng.random((2, 1, 3, 4, tokens), np.float32)
    shares, sums = scanned(torch.tensor(decays), torch.tensor(added))
    share, state = np.ones((3, 4), np.float32), np.zeros((3, 4), np.float32)
    for token in range(tokens):
        share = share * decays[0, :, :, token]
        state = state * decays[0, :, :, token] + added[0, :, :, token]
        np.testing.assert_allclose(shares[0, :, :, token], share, rtol=1e-5)
        np.testing.assert_allclose(sums[0, :, :, token], state, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_an_older_name_of_the_embedding(kind: str, tmp_path: Path) -> None:
    """transformers reads it too."""
    model = build_mamba2() if kind == "mamba2" else build_scan(kind, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    older = {name.replace("embeddings.", "embedding."): t for name, t in load_file(path).items()}
    save_file(older, path, {"format": "pt"})
    read = open_checkpoint(tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(read.read(name), tensor)


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    kind = draw(st.sampled_from(list(SCANS)))
    eps = {"mixer_rms_eps": draw(st.sampled_from([1e-6, 1e-2]))} if kind == "falcon_mamba" else {}
    return kind, eps | {
        "num_hidden_layers": draw(st.integers(1, 3)),
        "hidden_size": draw(st.integers(10, 70)),
        "expand": draw(st.integers(1, 3)),
        "state_size": draw(st.integers(1, 12)),
        "time_step_rank": draw(st.integers(1, 12) | st.just("auto")),
        "conv_kernel": draw(st.integers(1, 5)),
        "use_bias": draw(st.booleans()),
        "use_conv_bias": draw(st.booleans()),
        "layer_norm_epsilon": draw(st.sampled_from([1e-6, 1e-2])),
        "hidden_act": draw(st.sampled_from(["silu", "gelu", "relu"])),
        "vocab_size": draw(st.integers(10, 300)),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=10, derandomize=True)
@given(configs(), cuts)
def test_anything(drawn: tuple[str, dict[str, Any]], pieces: list[int]) -> None:
    kind, config = drawn
    assert_parity(build_scan(kind, **config), recipe(kind="per-layer"), {"pieces": pieces})
