"""A head that chooses is judged by all logits among which it does."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import host_tables
from cetane.engine.engine import Engine
from cetane.gates.heads import choices, chooser
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import ProbeTask, Seen, observe
from cetane.gates.port import other_number, packaged, used_in
from cetane.gates.probes import Probe, ProbePart
from cetane.gates.readings import wrong_choices
from cetane.gates.reference import Reference
from cetane.gates.structure import ONE_LOGIT, deviations
from cetane.gates.twin import TwinBackend, result_names
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


def with_entry(table: Op, other: float) -> Op:
    """A constant whose middle entry is another number."""
    (own,) = table.inputs["val"]
    assert isinstance(own, StoredConstant)
    numbers = np.array(own.numpy())
    numbers.flat[numbers.size // 2] = other
    return replace(table, inputs={"val": (StoredConstant(own.type, lambda: numbers),)})


@pytest.mark.parametrize(("choose", "tables"), [(True, 5), ("argmax", 0)])
def test_a_row_that_is_another_one_where_it_is_chosen(
    choose: bool | str, tables: int, tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    """Each entry of the tables of a head counts, though no probe chooses its row."""
    bundle = tiny_bundle(verify=None, prefill=None, head={"slices": 2, "choose": choose})
    port = packaged(bundle, Planner(checkpoint, bundle.plan.recipe), checkpoint)
    assert [*wrong_choices(port)] == []
    (head,) = port.choosers("head-1").values()
    assert head is not None
    found = [
        op
        for op in head.function.ops
        if op.kind == "const" and op.outputs[0].type and np.prod(op.outputs[0].type.shape) > 4
    ]
    assert len(found) == tables
    for table in found:
        ops = tuple(with_entry(op, 2.5) if op is table else op for op in head.function.ops)
        body = replace(head.function.body, ops=ops)
        changed = replace(head, function=replace(head.function, body=body))
        wrong = SimpleNamespace(
            planner=SimpleNamespace(members=["head-1"]), choosers=lambda _, own=changed: {"": own}
        )
        (said,) = wrong_choices(wrong)  # type: ignore[arg-type]
        assert (said.kind, said.shard) == ("choices", "head-1")


def test_the_choices_of_a_function_for_any_number_of_tokens(
    tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    bundle = tiny_bundle(shapes="range", head={"slices": 1, "choose": "argmax"})
    port = packaged(bundle, Planner(checkpoint, bundle.plan.recipe), checkpoint)
    (head,) = port.choosers("head-0").values()
    assert head is not None and head.wrong_rows() == []


def test_a_head_that_chooses_by_something_else(
    tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    """By its hidden state, as one that replaces a certain token would."""
    bundle = tiny_bundle(verify=None, prefill=None, head={"slices": 2, "choose": True})
    port = packaged(bundle, Planner(checkpoint, bundle.plan.recipe), checkpoint)
    (plan,) = (shard for shard in port.plan.shards if shard.name == "head-1")
    ((name, index, _),) = port.functions("head-1")
    used = result_names(used_in(port.planner, "head-1", name))
    ((rows, value),) = choices(index.function, used)
    assert value is not None
    assert chooser(index.function, plan.functions[0], rows, value) is not None
    others = replace(value, name="others")
    assert chooser(index.function, plan.functions[0], rows, others) is None


def test_a_head_that_takes_no_maximum() -> None:
    port = SimpleNamespace(
        planner=SimpleNamespace(members=["head-1"]), choosers=lambda _: {"decode": None}
    )
    (said,) = wrong_choices(port)  # type: ignore[arg-type]
    assert said.problem == "decode does not choose by its logits alone"
