"""The truth is what transformers' own loading gives."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.gates.reference import Reference

TOKENS = [5, 250, 17, 3, 99, 254, 40]


def test_logits(checkpoint: Checkpoint, truth: transformers.PreTrainedModel) -> None:
    expected = truth(torch.tensor([TOKENS])).logits[0].detach().numpy()
    found = Reference(checkpoint).run(TOKENS)
    np.testing.assert_allclose(found.logits, expected, atol=1e-5)
    assert found.hidden == {}


def test_hidden_states(checkpoint: Checkpoint, truth: transformers.PreTrainedModel) -> None:
    modules = ["model.layers.0", "model.layers.1"]
    found = Reference(checkpoint).run(TOKENS, modules).hidden
    states = truth(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
    np.testing.assert_allclose(found["model.layers.0"], states[1][0].detach().numpy(), atol=1e-5)
    normed = truth.model.norm(torch.tensor(found["model.layers.1"])).detach().numpy()
    np.testing.assert_allclose(normed, states[2][0].detach().numpy(), atol=1e-5)


def test_agrees(checkpoint: Checkpoint, truth: transformers.PreTrainedModel) -> None:
    generated = truth.generate(
        torch.tensor([TOKENS]), do_sample=False, max_new_tokens=8, eos_token_id=None
    )[0, len(TOKENS) :].tolist()
    reference = Reference(checkpoint)
    assert reference.agrees(TOKENS, generated).tolist() == [True] * 8
    generated[5] = (generated[5] + 1) % 288
    assert reference.agrees(TOKENS, generated).tolist()[:6] == [True] * 5 + [False]


@pytest.mark.parametrize(
    ("family", "config"), [("qwen2", {"tie_word_embeddings": True}), ("qwen3", {})]
)
def test_other_families(
    family: str,
    config: dict[str, Any],
    tiny_model: Callable[..., Any],
    in_memory: Callable[..., Any],
    tmp_path: Path,
) -> None:
    model = tiny_model(family, num_hidden_layers=1, **config)
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = theirs(torch.tensor([TOKENS])).logits[0].detach().numpy()
    np.testing.assert_allclose(Reference(in_memory(model)).run(TOKENS).logits, expected, atol=1e-5)


def test_a_checkpoint_that_does_not_fit(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(tiny_model(num_hidden_layers=1))
    checkpoint.tensors["model.norm.weight"] = torch.zeros(63)
    with pytest.raises(CetaneError, match=r"model\.norm\.weight: shape \(63,\)"):
        Reference(checkpoint)
