"""Scores of heads: attention by hand, and gates whose gradients are known."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import build_model

from cetane.checkpoint import open_checkpoint
from cetane.files import silent
from cetane.fitting.heads import RATE, gate_scores, mass_scores
from cetane.fitting.pass_keys import PassKeys, hide


@pytest.fixture
def text(tiny_checkpoint_folder: Path) -> PassKeys:
    tokenizer = open_checkpoint(tiny_checkpoint_folder).tokenizer
    return hide(tokenizer, tokenizer.encode_plain("a fuel. ") * 40, 300, seed=0, keys=2)


def model_of(layers: int = 2) -> Any:
    model = build_model("llama", max_position_embeddings=512, num_hidden_layers=layers)
    return model.requires_grad_(False)


def test_mass_is_the_attention_on_digits(text: PassKeys) -> None:
    """Against the weights that transformers' eager attention gives out."""
    model = model_of()
    tokens, answers = text.whole
    with torch.no_grad():
        weights = model(torch.tensor([tokens]), output_attentions=True).attentions
    expected = []
    for layer in weights:
        total = torch.zeros(4)
        for question, answer in zip(text.questions, answers, strict=True):
            digits = slice(question.place.stop - len(question.answer), question.place.stop)
            for at in answer:
                total += layer[0, :, at - 1, digits].sum(-1) / len(answer)
        mean = (total / len(text.questions)).reshape(2, 2)
        expected.append(mean.amax(1).tolist())
    scores = mass_scores(model, {0: 2, 1: 2}, [text], silent)
    assert scores == tuple(pytest.approx(row, abs=2e-6) for row in expected)
    assert mass_scores(model, {1: 2}, [text], silent)[0] == ()
    assert model.config._attn_implementation == "eager"


def test_gates_of_heads_that_lose_nothing_fall(text: PassKeys) -> None:
    """With a window over the whole text there is no error: Adam takes whole steps to zero."""
    fell = 1 - 3 * RATE
    scores = gate_scores(model_of(), {0: 2, 1: 2}, [text] * 3, 4, 400, silent)
    assert scores == (pytest.approx((fell, fell), abs=1e-4),) * 2
    many = gate_scores(model_of(1), {0: 2}, [text] * 25, 4, 400, silent)
    assert many == ((0.0, 0.0),)


def test_the_gate_of_a_head_that_matters_stays(text: PassKeys) -> None:
    """Only the second key/value head reaches the output, and its values are large."""
    model = model_of(1)
    attention = model.model.layers[0].self_attn
    attention.o_proj.weight[:, : attention.head_dim * 2] = 0
    attention.v_proj.weight[attention.head_dim :] *= 50
    ((idle, needed),) = gate_scores(model, {0: 2}, [text] * 8, 0, 2, silent)
    assert idle == pytest.approx(1 - 8 * RATE, abs=1e-3)
    assert needed > idle + 0.2
