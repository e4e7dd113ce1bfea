"""Where rounding may decide an expert, and where it may not."""

import numpy as np

from cetane.gates.reference import Observed
from cetane.gates.structure import LOGITS, first_undecided

CLOSE, FAR = 1e-5, 0.5


def observed(margins: dict[int, list[float]]) -> Observed:
    return Observed(np.zeros((4, 8)), {}, {n: np.array(row) for n, row in margins.items()})


def test_a_tie_excuses_its_layer_and_later_ones() -> None:
    theirs = observed({1: [FAR, FAR, FAR, CLOSE], 3: [FAR, CLOSE, FAR, FAR]})
    firsts = [first_undecided(theirs, (f"model.layers.{n}", 0)) for n in range(5)]
    assert firsts == [None, 3, 3, 1, 1]
    assert first_undecided(theirs, LOGITS) == 1
    assert first_undecided(theirs, ("model.norm", 0)) == 1


def test_without_experts_nothing_is_undecided() -> None:
    assert first_undecided(observed({}), LOGITS) is None
