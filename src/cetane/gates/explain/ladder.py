"""Explains first shards that were refused."""

from cetane.checkpoint import Checkpoint
from cetane.gates.authored import Authored
from cetane.gates.bases import STATED
from cetane.gates.explain.explanation import Explanation, with_lost
from cetane.gates.explain.graph import first_off, off_limit, wrong_tensor
from cetane.gates.explain.weights import other_base, other_constant
from cetane.gates.ladder import LadderResult, climb
from cetane.gates.reference import reference_of
from cetane.planner import Planner
from cetane.schema.recipe import Recipe

BUILD_AND_DIFF = "Make a bundle with cetane build, and run cetane diff BUNDLE --model CHECKPOINT."


def explain_ladder(verdict: LadderResult, checkpoint: Checkpoint, recipe: Recipe) -> Explanation:
    """Why the first shards of every kind were refused. If a graph is wrong, their authored modules
    run on the same tokens."""
    first = next(check for check in verdict.checks if not check.passed)
    if first.name.endswith(STATED):
        return other_base(first)
    if verdict.wrong_weights:
        return other_constant(verdict.wrong_weights[0])
    wrong_row = first_off(verdict.structure)
    assert wrong_row is not None
    shards = dict.fromkeys(one.shard for one in verdict.structure)

    def right(modules: Authored) -> bool:
        planner = modules.unrounded
        judged = climb(modules.engine(planner), planner, checkpoint, shards)
        return not any(off_limit(row) for _, row in judged)

    authored = Authored(Planner(checkpoint, recipe), checkpoint, reference_of(checkpoint))
    found = wrong_tensor(wrong_row, verdict.structure, authored, right, BUILD_AND_DIFF)
    return with_lost(found, verdict.lost)
