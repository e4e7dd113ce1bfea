"""How many tokens the probes of a model have: as many as time and memory allow."""

import math

from cetane.gates.experts import routed_blocks
from cetane.gates.probes import WORK
from cetane.gates.reference import Reference
from cetane.planner import Planner
from cetane.planner.weights import weight_count
from cetane.schema.plan import Plan

TEXT_BYTES, MOST_TEXT_BYTES = 2 << 30, 8 << 30
"""Bytes that the model's attention may take for a text, and for a text that must exceed a window. A
model with eager attention holds the scores of all heads at once."""
SCORE_BYTES = 12
"""Bytes that one score takes: three fp32 numbers, with its softmax and an intermediate result."""
TIMES = 8
"""How often random tokens take each expert, on average: one of some 3,000 is left out by chance."""
WINDOWS = "sliding_window", "attention_chunk_size"
"""The fields of a config that say how many attention keys some layers see."""


def filled(planner: Planner, plan: Plan, reference: Reference) -> int:
    """The number of tokens with which the text probe fills caches: all that time and memory allow.

    It reaches the model's largest window, if memory allows, whatever the plan says of windows."""
    heads = getattr(reference.model.config, "num_attention_heads", 1)  # Mamba-2 alone has none
    by_time = affordable(planner, plan)
    sizes = TEXT_BYTES, MOST_TEXT_BYTES
    by_memory, most = (math.isqrt(size // (SCORE_BYTES * heads)) for size in sizes)
    return max(min(by_time, by_memory), min(largest_window(plan, reference), most))


def tokens_for_experts(planner: Planner, plan: Plan) -> int:
    """The number of random tokens that reach nearly all experts, if their routers are fair and time
    allows: each expert is then taken `TIMES` times on average."""
    routed = routed_blocks(planner.model.layers).values()
    shares = (planner.model.channels[block.scores] / block.chosen for block in routed)
    return min(math.ceil(TIMES * max(shares, default=0)), affordable(planner, plan))


def affordable(planner: Planner, plan: Plan) -> int:
    """The number of tokens that may be read in every mode, as far as time allows."""
    return WORK // (weight_count(planner.blocks) * len(plan.modes))


def largest_window(plan: Plan, reference: Reference) -> int:
    """The most keys that the model's windowed layers see; 0 if all layers see the context."""
    windows = (getattr(reference.model.config, name, None) or 0 for name in WINDOWS)
    return max((own for own in windows if own < plan.recipe.cache.context), default=0)
