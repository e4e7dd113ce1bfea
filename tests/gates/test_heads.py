"""A head that chooses is judged by all logits among which it does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import host_tables
from cetane.engine.engine import Engine
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import ProbeTask, Seen, observe
from cetane.gates.port import other_number
from cetane.gates.probes import Probe, ProbePart
from cetane.gates.reference import Reference
from cetane.gates.structure import ONE_LOGIT, deviations
from cetane.gates.twin import TwinBackend
from cetane.mil import MilFunction, Op
from cetane.mil.program import NamedValue, StoredConstant
from cetane.planner import Planner

TOKENS = (5, 17, 80, 41, 9, 200, 33)
TASK = ProbeTask("decode", Probe("text", TOKENS), (ProbePart("decode", len(TOKENS)),))


def hiding(row: int, function: MilFunction) -> MilFunction:
    """The function with a head that hides one of its rows."""

    def changed(op: Op) -> Iterator[Op]:
        if op.kind != "conv" or not any("lm_head" in name for name in op.references()):
            yield op
            return
        (made,) = op.outputs
        assert made.type is not None
        low = np.array(other_number(made.type, 0.0).numpy())
        low[0, row] = -1e4
        plain = NamedValue("plain", made.type)
        yield replace(op, outputs=(plain,))
        hidden = StoredConstant(made.type, lambda: low)
        yield Op("add", "hide", {"x": ("plain",), "y": (hidden,)}, (made,))

    ops = tuple(new for op in function.ops for new in changed(op))
    return replace(function, body=replace(function.body, ops=ops))


@pytest.mark.parametrize("choose", [True, "argmax"])
def test_a_row_that_no_probe_chooses(
    choose: bool | str, tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    """The choices of a head that hides one are right on every probe."""
    bundle = tiny_bundle(verify=None, prefill=None, head={"slices": 2, "choose": choose})
    plan, planner = bundle.plan, Planner(checkpoint, bundle.plan.recipe)
    reference, tables = Reference(checkpoint), host_tables(planner, checkpoint)

    def seen_by(change: Callable[[MilFunction], MilFunction]) -> Seen:
        backend = TwinBackend(bundle, planner, checkpoint, change)
        (seen,) = observe(Engine(plan, backend, tables, resident=False), planner, [TASK])
        return seen

    def errors(seen: Seen) -> dict[str, float]:
        truths = ModelResults.ask(reference, [TASK], [seen])
        rows = deviations(plan, planner, [TASK], [seen], truths)
        return {one.tensor: one.relative for one in rows if one.shard == plan.shards[-1].name}

    right = seen_by(lambda function: function)
    assert max(errors(right).values()) < 1e-4
    assert len(right.slices) == 2
    (_, first), (_, second) = right.slices.values()
    count = min(first.shape[1], second.shape[1])
    worst = np.maximum(first[:, :count], second[:, :count]).max(0).argmin()
    wrong = seen_by(partial(hiding, int(worst)))
    assert np.array_equal(wrong.logits, right.logits)
    assert {name for name, error in errors(wrong).items() if error > 1e-3} == {ONE_LOGIT}
