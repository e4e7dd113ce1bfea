"""Bundles that are right, and some that are not, of a llama and of a ZAYA."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.conftest import build_tokenizer, tiny_recipe
from tests.converting import converted_once
from tests.families.zaya_models import build_zaya

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.mil.program import Op, Program
from cetane.pipeline.build import build
from cetane.schema.recipe import Recipe, parse_recipe

ZAYA: dict[str, Any] = {
    "vocab_size": 288,
    "num_hidden_layers": 2,
    "num_experts": 2,
    "layer_types": ["hybrid_sliding"] * 2,
}


def changed(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint in which `change` changed the tensors."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


def zaya_recipe(**options: Any) -> Recipe:
    """A recipe for the tiny ZAYA; `options` replace tables of it."""
    content = {
        "name": "zaya",
        "layout": {"kind": "per-block"},
        "cache": {"context": 64},
        "tokens": {"verify": 0, "prefill": 0},
    }
    return parse_recipe(content | options, "zaya")


ROUTED = {
    "layout": {"kind": "per-layer", "routed": ["decode"]},
    "tokens": {"verify": 0, "prefill": 8},
}
"""Decoding runs only the chosen experts, prefill all of them."""


@pytest.fixture(scope="session")
def good(tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """All layers in one shard, and a head in two; decoding and prefill."""
    wanted = tiny_recipe(verify=None, layout={"kind": "chunks", "chunks": 1}, head={"slices": 2})
    target = tmp_path_factory.mktemp("good") / "bundle"
    with converted_once():
        return build(open_checkpoint(tiny_checkpoint_folder), wanted, target, lambda *_: None)


@pytest.fixture(scope="session")
def bad(
    good: Bundle, tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """Built from a checkpoint in which one row of one weight is wrong."""

    def perturb(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.down_proj.weight"][3] += 1.0

    folder = tmp_path_factory.mktemp("perturbed")
    perturbed = open_checkpoint(changed(tiny_checkpoint_folder, folder / "checkpoint", perturb))
    with converted_once():
        return build(perturbed, good.plan.recipe, folder / "bundle", lambda *_: None)


@pytest.fixture
def codes(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    """A bundle with caches of 8 bits. One shard has both layers."""
    return tiny_bundle(
        cache={"context": 64, "format": "int8"},
        target={"deployment": "iOS26"},
        layout={"kind": "single"},
    )


def with_ops(program: Program, change: Callable[[Op], Sequence[Op]]) -> Program:
    """A program with the ops of `change` in the place of each op."""
    functions = {}
    for name, function in program.functions.items():
        ops = tuple(new for op in function.ops for new in change(op))
        functions[name] = replace(function, body=replace(function.body, ops=ops))
    return replace(program, functions=functions)


@pytest.fixture
def checkpoint(tiny_checkpoint_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_checkpoint_folder)


@pytest.fixture(scope="session")
def truth(tiny_checkpoint_folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers itself loads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="session")
def zaya_model() -> Any:
    """Two layers in which every parameter matters, balancing biases too."""
    return build_zaya(**ZAYA)


@pytest.fixture(scope="session")
def zaya_folder(zaya_model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the tiny ZAYA, with a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-zaya")
    zaya_model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def zaya_checkpoint(zaya_folder: Path) -> Checkpoint:
    return open_checkpoint(zaya_folder)


@pytest.fixture(scope="session")
def zaya_bundle(
    zaya_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Bundle]:
    """`zaya_bundle(**options)`: a bundle by `zaya_recipe(**options)`, built once."""
    made: dict[str, Bundle] = {}

    def bundle(**options: Any) -> Bundle:
        wanted = zaya_recipe(**options)
        key = wanted.model_dump_json()
        if key not in made:
            target = tmp_path_factory.mktemp("zaya") / "bundle"
            with converted_once():
                made[key] = build(open_checkpoint(zaya_folder), wanted, target, lambda *_: None)
        return made[key]

    return bundle


@pytest.fixture(scope="session")
def departed(zaya_bundle: Callable[..., Bundle]) -> Bundle:
    """A ZAYA whose attention departs from it."""
    return zaya_bundle(family={"departures": ["no-qk-norm"]})
