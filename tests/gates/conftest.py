"""A bundle that is right, and the same with one shard that is not."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cetane.build import build
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint


@pytest.fixture(scope="session")
def good(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(verify=None, layout={"kind": "chunks", "chunks": 1}, head={"slices": 2})


@pytest.fixture(scope="session")
def bad(
    good: Bundle, tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """Built from a checkpoint in which one row of one weight is wrong."""
    folder = tmp_path_factory.mktemp("perturbed")
    shutil.copytree(tiny_checkpoint_folder, folder / "checkpoint")
    file = folder / "checkpoint/model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.mlp.down_proj.weight"][3] += 1.0
    save_file(weights, file)
    perturbed = open_checkpoint(folder / "checkpoint")
    return build(perturbed, good.plan.recipe, folder / "bundle", lambda *_: None)


@pytest.fixture
def checkpoint(tiny_checkpoint_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint_folder)


@pytest.fixture(scope="session")
def truth(tiny_checkpoint_folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers itself loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    ).eval()
