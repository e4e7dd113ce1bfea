"""What a kit expects of a bundle, and whether it leaves something out."""

from collections.abc import Sequence
from typing import Any

from tests.families.mixture_models import build_mixture
from tests.families.parity import engine_of
from tests.families.recipes import recipe as routed_recipe

from cetane.kit.expectation import (
    Expectation,
    comparable,
    experts,
    is_complete,
    routes,
    uncompared,
)
from cetane.schema.plan import Plan


def without(expected: Expectation, names: Sequence[str]) -> Expectation:
    """An expectation that compares nothing of some functions."""
    kept = {name: () if name in names else own for name, own in expected.functions.items()}
    return expected.model_copy(update={"functions": kept})


def all_of(plan: Plan) -> Expectation:
    """An expectation that compares every output of every function."""
    outputs = {"/".join(k): tuple(o.name for o in f.outputs) for k, f in plan.functions.items()}
    return Expectation(positions={}, functions=outputs)


def test_a_function_of_which_nothing_is_compared_is_named(adapted: Any) -> None:
    plan = adapted.bundle.plan
    own = ["/".join(key) for key, function in plan.functions.items() if function.adapter]
    assert own and uncompared(plan, without(all_of(plan), own)) == own
    assert len(uncompared(plan, Expectation(positions={}, functions={}))) == len(plan.functions)


def test_experts_that_no_token_chose_are_excused() -> None:
    wanted = routed_recipe("readonly", "chunks", routed=("decode",))
    plan = engine_of(build_mixture("mixtral"), wanted).plan
    every = all_of(plan)
    chosen = {f"{r.shard}/{name}" for r in routes(plan) for names in r.experts for name in names}
    assert chosen and not uncompared(plan, without(every, [*chosen]))
    others = [name for name in every.functions if name not in chosen]
    assert uncompared(plan, without(every, others[:1])) == others[:1]


def test_experts_that_no_token_chose_make_no_expectation_incomplete() -> None:
    wanted = routed_recipe("readonly", "chunks", routed=("decode",))
    plan = engine_of(build_mixture("mixtral"), wanted).plan
    every = Expectation(
        positions={},
        functions={
            "/".join(key): tuple(one.name for one in comparable(plan, key))
            for key in plan.functions
        },
    )
    chosen = ["/".join(key) for key in experts(plan)]
    others = [name for name in every.functions if name not in chosen]
    assert is_complete(plan, every, {}) and is_complete(plan, without(every, chosen), {})
    assert not is_complete(plan, without(every, others[:1]), {})
