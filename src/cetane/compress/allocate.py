"""The allocation: a format for each group of weights, with the least sum of harms for a size.

To choose one option from every group under a budget is the multiple-choice knapsack problem. A
dynamic programme over sizes solves it exactly, up to a unit of size. A greedy choice by gain per
byte may not: with two or three formats near a budget, the last few steps decide. The programme
assumes that harms add up; judging the resulting point tests this.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 16
"""The most units of size in the budget that the smallest options leave. Sizes are rounded up."""


@dataclass(frozen=True)
class Option:
    """One format for a group of weights. Harms of groups add up, such as a KL in nats a token."""

    name: str
    nbytes: int
    harm: float


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> list[Option] | None:
    """One option of every group, with the least sum of harms for at most `budget` bytes.

    None if even the smallest options do not fit.
    """
    smallest = [min(option.nbytes for option in options) for options in groups]
    spare = budget - sum(smallest)  # an option costs only its excess over the smallest
    if spare < 0:
        return None
    unit = max(1, -(-spare // UNITS))
    room = spare // unit
    least = np.zeros(room + 1)  # the harm of the groups so far, by the units that they may take
    taken = []
    for options, floor in zip(groups, smallest, strict=True):
        costs = [-(-(option.nbytes - floor) // unit) for option in options]
        harms = np.full((len(options), room + 1), np.inf)
        for row, option, cost in zip(harms, options, costs, strict=True):
            if cost <= room:
                row[cost:] = least[: room + 1 - cost] + option.harm
        best = harms.argmin(axis=0)
        least = np.take_along_axis(harms, best[None], 0)[0]
        taken.append((best, costs))
    chosen = []
    for options, (best, costs) in zip(reversed(groups), reversed(taken), strict=True):
        index = best[room]
        chosen.append(options[index])
        room -= costs[index]
    return chosen[::-1]
