"""Compressions are judged on a model of the simplest form that any recipe has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.gates.compressions import Judge, plain
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe, parse_recipe, shipped

WINDOW = 32
TOKENS = list(range(1, WINDOW + 1))


@pytest.mark.parametrize("name", shipped())
def test_every_recipe_that_ships_can_be_judged(name: str) -> None:
    recipe = load_recipe(name)
    for window, context in ((None, recipe.cache.context), (WINDOW, WINDOW)):
        made = plain(recipe, window)
        assert made.cache.context == context
        assert (made.family, made.head.subset) == (recipe.family, recipe.head.subset)


@pytest.mark.parametrize(
    ("cache", "prefill"),
    [
        ({"contract": "stateful", "padded": True, "state_heads": 4}, 8),
        ({"capacities": [32, 64]}, 8),
        ({}, 128),
    ],
    ids=["padded", "capacities", "wide"],
)
def test_the_form_of_caches_and_calls_changes_no_logit(
    cache: dict[str, Any], prefill: int, tiny_checkpoint_folder: Path
) -> None:
    recipe = parse_recipe(
        {"name": "x", "cache": {"context": 128} | cache, "tokens": {"prefill": prefill}}, "x"
    )
    judge = Judge(open_checkpoint(tiny_checkpoint_folder), recipe, WINDOW)
    (window,) = judge.read(TOKENS)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()
    with torch.inference_mode():
        truth = model(torch.tensor([TOKENS])).logits[0].numpy()
    np.testing.assert_allclose(window.logits, truth, rtol=0, atol=2e-3 * np.abs(truth).max())


def test_a_model_that_does_not_fit_in_memory_is_refused(
    tiny_checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a weight is read: transformers counts 4 bytes for each, and the host has the table."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint_folder)
    size = 4 * (model.num_parameters() - model.get_input_embeddings().weight.numel())
    checkpoint, recipe = open_checkpoint(tiny_checkpoint_folder), load_recipe("int8")
    recipe = override(recipe, {"cache.context": 64, "head.slices": 1})
    monkeypatch.setattr("cetane.gates.compressions.installed_memory", lambda: size)
    Judge(checkpoint, recipe)
    monkeypatch.setattr("cetane.gates.compressions.installed_memory", lambda: size - 1)
    monkeypatch.setattr("cetane.gates.compressions.authored_engine", None)
    with pytest.raises(CetaneError, match=r"all weights in fp32, .*--set compression\.default="):
        Judge(checkpoint, recipe)
