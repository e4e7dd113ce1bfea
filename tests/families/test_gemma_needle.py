"""Recall of a needle by distance, with every way that full layers may attend.

The model is made by hand: one full layer that, at the question, looks for a needle by content, in
channels that no rotation touches, and says what it found.
"""

from typing import Any

import numpy as np
import pytest
import torch
from tests.families.gemma_models import FULL, build_gemma4, recipe
from tests.families.parity import TOLERANCE, engine_of

FILLER, NEEDLE, QUESTION = 0, 20, 40
NEEDLES = 12
CONTEXT, WINDOW, SINKS = 160, 64, 4
SINGLE = {"kind": "single"}
DISTANCES = (1, 8, 31, 62, 63, 64, 65, 90, 130, 149)
"""From the question back to the needle; a window of 64 holds the question and 63 before it."""


@torch.no_grad()
def seeker() -> Any:
    """Tokens are channels: filler 0, any needle 1 and one of 16 and up, the question 2."""
    model = build_gemma4(
        num_hidden_layers=1,
        layer_types=[FULL],
        num_kv_shared_layers=0,
        hidden_size_per_layer_input=0,
        num_attention_heads=1,
        hidden_size=64,
        vocab_size=48,
        vocab_size_per_layer_input=48,
        final_logit_softcapping=None,
        pad_token_id=None,
    )
    layer, table = model.model.layers[0], model.model.embed_tokens.weight
    for parameter in model.parameters():
        parameter.zero_()
    table[:NEEDLE, 0] = 1
    for index in range(NEEDLES):
        table[NEEDLE + index, [1, 16 + index]] = 1
    table[QUESTION, 2] = 1
    attention = layer.self_attn
    attention.q_proj.weight[8, 2] = attention.k_proj.weight[8, 1] = 1  # heads of 32: 4 pairs turn
    attention.q_proj.weight[9, 0] = attention.k_proj.weight[10, 0] = 1
    attention.k_proj.weight[11, 2] = 1
    attention.v_proj.weight[range(NEEDLES), range(16, 16 + NEEDLES)] = 1
    attention.o_proj.weight[range(16, 16 + NEEDLES), range(NEEDLES)] = 1
    for norm in (layer.input_layernorm, attention.q_norm, attention.k_norm, model.model.norm):
        norm.weight.fill_(1)
    layer.post_attention_layernorm.weight.fill_(4)
    layer.layer_scalar.fill_(1)
    return model


def text(distance: int, needle: int) -> list[int]:
    """150 tokens, the last of them the question."""
    tokens = np.random.default_rng(distance).integers(FILLER, NEEDLE, 149).tolist()
    tokens[149 - distance] = NEEDLE + needle
    return [*tokens, QUESTION]


def recall(model: Any, family: dict[str, Any], contract: str) -> dict[int, float]:
    """Share of needles found, by distance."""
    engine = engine_of(model, recipe(contract, layout=SINGLE, context=CONTEXT, family=family))
    found = {}
    for distance in DISTANCES:
        needles = (0, 5, 11)
        answers = [engine.session().feed(text(distance, needle)) for needle in needles]
        chosen = [int(np.argmax(logits)) - NEEDLE for logits in answers if logits is not None]
        found[distance] = float(np.mean(np.array(chosen) == needles))
    return found


@pytest.mark.parametrize("contract", ["readonly", "blend", "stateful"])
def test_recall(contract: str) -> None:
    model = seeker()
    near = {distance: float(distance < WINDOW) for distance in DISTANCES}
    assert recall(model, {}, contract) == dict.fromkeys(DISTANCES, 1.0)
    assert recall(model, {"full_block": 48}, contract) == dict.fromkeys(DISTANCES, 1.0)
    assert recall(model, {"full_window": WINDOW}, contract) == near
    first = {distance: 1.0 for distance in DISTANCES if distance >= 150 - SINKS}
    assert recall(model, {"full_window": WINDOW, "sinks": SINKS}, contract) == near | first


def test_it_is_the_model_that_recalls() -> None:
    model = seeker()
    ids = text(130, 7)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    assert expected[-1].argmax() == NEEDLE + 7
    found = engine_of(model, recipe(layout=SINGLE, context=CONTEXT)).session().feed(ids, "all")
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE
