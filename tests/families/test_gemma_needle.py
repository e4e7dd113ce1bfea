"""Recall of a needle by distance, with every way that full layers may attend."""

import numpy as np
import pytest
import torch
from tests.families.gemma_models import recipe
from tests.families.parity import TOLERANCE

from cetane.engine.authored import authored_engine
from cetane.lab.needle import CONTEXT, DISTANCES, LENGTH, NEEDLE, WINDOW, Seeker, recall, text
from cetane.planner import Planner

SINKS = 4


@pytest.mark.parametrize("contract", ["readonly", "blend", "stateful"])
def test_recall(contract: str) -> None:
    near = {distance: float(distance < WINDOW) for distance in DISTANCES}
    assert recall({}, contract) == dict.fromkeys(DISTANCES, 1.0)
    assert recall({"full_block": 48}, contract) == dict.fromkeys(DISTANCES, 1.0)
    assert recall({"full_window": WINDOW}, contract) == near
    first = {distance: 1.0 for distance in DISTANCES if distance >= LENGTH - SINKS}
    assert recall({"full_window": WINDOW, "sinks": SINKS}, contract) == near | first


def test_it_is_the_model_that_recalls() -> None:
    seeker = Seeker()
    ids = text(130, 7)
    with torch.inference_mode():
        expected = seeker.model(torch.tensor([ids])).logits[0].numpy()
    assert expected[-1].argmax() == NEEDLE + 7
    planner = Planner(seeker, recipe(layout={"kind": "single"}, context=CONTEXT))
    found = authored_engine(planner, seeker).session().feed(ids, "all")
    assert found is not None
    assert np.abs(found - expected).max() <= TOLERANCE
