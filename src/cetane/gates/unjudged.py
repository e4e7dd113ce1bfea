"""What a proof did not judge, and what it found near a limit, as warnings."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from cetane.gates.golden_result import NEAR_LIMIT, Range
from cetane.gates.observe import Seen, unchosen
from cetane.gates.probes import holds_host_parts
from cetane.hardware import LARGEST_FP16
from cetane.planner import Planner
from cetane.schema.plan import Plan

TOO_LARGE = "greedy decoding was left out: the whole model would not fit in memory"
TOO_LONG = (
    "positions beyond {} were judged with few keys, and an ANE's arithmetic with {} keys, of a "
    "context of {} tokens: more would take too long"
)
TOO_WIDE = "no text was longer than the model's window of {} tokens: that takes too much memory"
TOO_NEAR = (
    "streaming heads see {} tokens, and no judged text was longer: what they miss was not judged"
)
TOO_SHORT = (
    "drafts, rewinds and logits of a last token alone were not judged in {}: the context of {} "
    "tokens is too short"
)
IDLE = (
    "no call of a probe ran these functions of experts, {} in all, so random inputs compared them "
    "with cetane's own modules, and not with the model: {}"
)
UNCHOSEN = (
    "no token of a probe was seen to choose these experts, {} in all, so their part of the graphs "
    "of {} was not judged: {}"
)
UNROUNDED = (
    "no token reached these functions of experts in fp16, {} in all, so their range was not "
    "judged: {}"
)
NAMED = 3
"""The most functions or layers that a warning names; it counts all."""


def unreached_experts(
    planner: Planner, plan: Plan, idle: Sequence[tuple[str, str]], seen: Sequence[Seen]
) -> Iterator[str]:
    """Warnings of experts that the probes did not reach: of `idle` functions, and of those that
    share a graph."""
    if idle:
        yield IDLE.format(len(idle), some(idle))
    found = unchosen(planner, plan, seen)
    for layers, same in groupby(sorted(found, key=found.__getitem__), found.__getitem__):
        named = [f"{count} of layer {layer}" for layer, count in layers[:NAMED]]
        count = sum(count for _, count in layers)
        yield UNCHOSEN.format(count, ", ".join(same), ", ".join(named))


def unrounded_experts(idle: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Warnings of `idle` functions, which fp16 did not run."""
    if idle:
        yield UNROUNDED.format(len(idle), some(idle))


def some(functions: Sequence[tuple[str, str]]) -> str:
    """The names of the first functions, behind those of their shards."""
    return ", ".join(map("/".join, functions[:NAMED]))


def unreached_tokens(plan: Plan, read: int, keys: int, window: int, text: int) -> Iterator[str]:
    """Warnings of what lies beyond the probes: host parts, a whole window, what streaming heads
    miss, and the end of the context.

    The probes of structure read `read` tokens, and those of an ANE's arithmetic reach `keys` keys.
    The model's largest `window` is 0 without one. At least `text` positions of text were judged.
    """
    context, streaming = plan.recipe.cache.context, plan.recipe.cache.streaming
    short = [mode for mode in plan.modes if not holds_host_parts(plan, mode, read)]
    if short:
        yield TOO_SHORT.format(", ".join(short), context)
    if read <= window:
        yield TOO_WIDE.format(window)
    seen = context if streaming is None else streaming.sinks + streaming.window
    if text <= seen < context:
        yield TOO_NEAR.format(seen)
    if min(read, keys) < context:
        yield TOO_LONG.format(read, keys, context)


def near(ranges: Sequence[Range], planner: Planner) -> Iterator[str]:
    """Warnings about residual streams near the end of fp16's range."""
    scale = planner.model.residual_scale
    for one in ranges:
        if one.largest > NEAR_LIMIT:
            yield (
                f"{one.block}: the residual stream reaches {one.largest:.0f}; "
                f"fp16 ends at {LARGEST_FP16:.0f}"
                + (f"; family.residual_scale is {scale:g} and can be smaller" if scale else "")
            )
