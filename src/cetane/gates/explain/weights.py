"""Explains constants that differ from the checkpoint, and parameters that nothing uses."""

from cetane.gates.explain.explanation import Explanation
from cetane.gates.explain.mends import undone
from cetane.gates.golden_result import GoldenResult
from cetane.gates.verdict import Check
from cetane.gates.weights import READING, WrongWeight
from cetane.schema.plan import Plan

PORT_AGAIN = "Port the model again with --rebuild."
QUANTIZE_AGAIN = (
    "Run cetane quantize-activations again; its --smooth changes weights on purpose, which only "
    "the gate activations judges."
)
"""What to do about a wrong constant of a bundle with activations of 8 bits."""


def wrong_weights(verdict: GoldenResult, plan: Plan) -> Explanation:
    """The explanation of a wrong constant, or of an unused parameter."""
    if not verdict.wrong_weights:
        return Explanation(
            cause="authoring",
            where=verdict.unused[0].partition(":")[0],
            sentence=f"The port does not use all of the model: {verdict.unused[0]}.",
            changes=undone(plan.recipe),
        )
    first = verdict.wrong_weights[0]
    if first.shard == READING:
        return Explanation(
            cause="weights",
            where=first.label,
            sentence=f"cetane reads the {first.label} of the model's files otherwise than "
            f"transformers: {first.problem}. Port the model as save_pretrained of transformers "
            "writes it, and report the file.",
        )
    return other_constant(first, QUANTIZE_AGAIN if verdict.activations else PORT_AGAIN)


def other_constant(wrong: WrongWeight, advice: str = PORT_AGAIN) -> Explanation:
    """The explanation of a constant that differs from the checkpoint."""
    what = f"{wrong.parameter} ({wrong.label})" if wrong.parameter else wrong.label
    return Explanation(
        cause="weights",
        where=f"{wrong.shard}/{wrong.label}",
        sentence=f"In {wrong.shard}, {what} differs from the checkpoint: {wrong.problem}. {advice}",
    )


def other_base(check: Check) -> Explanation:
    """The explanation of an adapter that was trained on another base."""
    name = check.name.partition(": ")[0]
    return Explanation(
        cause="weights",
        where=f"the adapter {name}",
        sentence=f"The adapter {name} states a base whose weights are not those here: they differ "
        f"by {check.value:.2g}, the limit is {check.limit:g}. Give the adapter's own base.",
    )
