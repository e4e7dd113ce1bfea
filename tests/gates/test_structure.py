"""Where rounding may decide an expert, and where it may not."""

import numpy as np

from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask
from cetane.gates.probes import Probe, ProbePart
from cetane.gates.reference import Observed
from cetane.gates.structure import LOGITS, deviation, excess, first_undecided

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


def test_a_mode_is_judged_on_its_own_tokens_behind_a_tie() -> None:
    """`decode` takes 6 tokens of 106. Its last three are wrong, all others right."""
    parts = ProbePart("decode", 3), ProbePart("prefill", 100), ProbePart("decode", 3)
    task = ProbeTask("decode", Probe("text", tuple(range(106))), parts)
    at, errors = np.arange(106), np.zeros(106)
    assert task.own(at).nonzero()[0].tolist() == [0, 1, 2, 103, 104, 105]
    errors[-3:] = 0.5
    judged = deviation("s", "logits", LOGITS, task, at, errors, first=2)
    assert judged.undecided == 0.5
    assert excess(judged) > limits().structure.relative
    assert deviation("s", "logits", LOGITS, task, at, 0 * errors, first=2).undecided == 0
    assert deviation("s", "logits", LOGITS, task, at[:103], 0 * errors[:103], 3).undecided == 0
