"""Which format each group of weights gets, so that the sum of their harms is least for a size.

A choice of one option from every group under a budget is the multiple-choice knapsack problem. A
dynamic programme over sizes solves it exactly, up to a unit of size, where choosing the best gain
per byte step by step may not: with two or three formats in reach of a budget, the last few steps
decide. That harms add up is an assumption, which the judged point tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

UNITS = 1 << 16
"""Sizes are rounded up to this part of the budget."""


@dataclass(frozen=True)
class Option:
    """One format for a group of weights."""

    name: str
    nbytes: int
    harm: float


def allocate(groups: Sequence[Sequence[Option]], budget: int) -> list[Option] | None:
    """One option of every group, with the least sum of harms for at most `budget` bytes.

    None where even the smallest do not fit.
    """
    smallest = [min(option.nbytes for option in options) for options in groups]
    spare = budget - sum(smallest)  # only what exceeds the smallest option is to be paid for
    if spare < 0:
        return None
    unit = max(1, -(-spare // UNITS))
    room = spare // unit
    least = np.zeros(room + 1)  # harm of the groups so far, by the units they may take
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
