"""Recall of a needle by distance, with every way that full layers may attend."""

import numpy as np
import pytest
import torch
from tests.families.gemma_models import recipe
from tests.families.parity import TOLERANCE

from cetane.engine.authored import authored_engine
from cetane.errors import CetaneError
from cetane.lab.needle import LONGEST, NEEDLE, Seeker, distances, recall, text
from cetane.planner import Planner

CONTEXT, WINDOW, SINKS = 160, 64, 4


@pytest.mark.parametrize("contract", ["readonly", "blend", "stateful"])
def test_recall(contract: str) -> None:
    def found(**family: int) -> dict[int, float]:
        return recall(family, contract, CONTEXT, WINDOW)

    places = distances(WINDOW, CONTEXT)
    assert {WINDOW - 1, WINDOW, CONTEXT - 1} < set(places)
    near = {distance: float(distance < WINDOW) for distance in places}
    assert found() == dict.fromkeys(places, 1.0)
    assert found(full_block=48) == dict.fromkeys(places, 1.0)
    assert found(full_window=WINDOW) == near
    first = {distance: 1.0 for distance in places if distance >= CONTEXT - SINKS}
    assert found(full_window=WINDOW, sinks=SINKS) == near | first


def test_it_is_the_model_that_recalls() -> None:
    seeker = Seeker()
    ids = text(130, 7, CONTEXT)
    with torch.inference_mode():
        expected = seeker.model(torch.tensor([ids])).logits[0].numpy()
    assert expected[-1].argmax() == NEEDLE + 7
    planner = Planner(seeker, recipe(layout={"kind": "single"}, context=CONTEXT))
    made = authored_engine(planner, seeker).session().feed(ids, "all")
    assert made is not None
    assert np.abs(made - expected).max() <= TOLERANCE


def test_a_context_that_is_too_long() -> None:
    with pytest.raises(CetaneError, match="at most 8192 tokens, not 16384"):
        recall({}, "readonly", 2 * LONGEST, WINDOW)
