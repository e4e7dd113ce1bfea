"""The choice, for a chip, of what a recipe leaves open (`layout.kind = "auto"`).

The rules of the chip ask for a cache contract. The chip is known to hold programs of some size and
number. Of the layouts with such programs, the one of the fastest predicted decode step is taken.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cetane.errors import CetaneError
from cetane.gates.residency.rule import Rule, load_rules
from cetane.gates.residency.rules.programs import SAFE_CONSTANTS
from cetane.gates.residency.target import Target
from cetane.hardware.chips import Chip, find_chip
from cetane.perf.breakeven import DraftingTimes
from cetane.perf.cost import cite
from cetane.perf.predict import Prediction, Predictor
from cetane.pipeline.request import FORMAT_OF_BITS
from cetane.planner import Planner
from cetane.schema.changes import decided, override
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode, Recipe

CONTRACT, SLICES, CHUNKS = "cache.contract", "head.slices", "layout.chunks"
KIND, VERIFY = "layout.kind", "tokens.verify"
RANKED_WIDTHS = (8, 4, 2)
"""Tokens of a verifying call, the widest first."""
FREE = 1.25
"""The most decode steps that a verifying call may take. Drafts then cost next to nothing."""
NEAR = 1.02
"""The most that the predicted step of a layout of fewer packages may take, in times the fastest."""


def recipe_for_chip(planner: Planner, target: Target, named: Collection[str] = ()) -> Recipe:
    """The planner's recipe with a contract, head slices, a layout and a verifier's width for a
    chip, each with its reason.

    Values whose dotted keys are `named` stay, but for a layout that is named "auto". A recipe that
    says its layout comes back as it is.
    CetaneError if the chip holds no layout, and for a padded cache whose contract is not named.
    """
    recipe = planner.recipe
    if recipe.layout.kind != "auto":
        return recipe
    if recipe.cache.padded and CONTRACT not in named:
        raise CetaneError(
            f'recipe {recipe.name}: layout.kind = "auto" takes the contract readonly for '
            f"{target.chip}, but cache.padded = true needs stateful",
            f"name the contract too (--set {CONTRACT}=stateful), or take cache.padded=false",
        )
    steps = (by_rules, by_longest_axis, by_known_programs, by_free_drafts)
    for step in steps:
        values, reason = step(Planner(planner.checkpoint, recipe, planner), target)
        open_values = {key: v for key, v in values.items() if key == KIND or key not in named}
        recipe = decided(recipe, open_values, dict.fromkeys(open_values, reason))
    return recipe


LayoutChoice = tuple[Mapping[str, Any], str]
"""Values by dotted key, and why."""


def by_rules(planner: Planner, target: Target) -> LayoutChoice:
    """The contract that the rules of a chip ask for."""
    asking = [
        rule.id
        for rule in load_rules().values()
        if rule.applies(target) and asks_for_readonly(rule)
    ]
    reason = f"the host writes the caches: {', '.join(asking)} speak against other contracts"
    return {CONTRACT: "readonly"}, reason


def asks_for_readonly(rule: Rule) -> bool:
    """Whether a rule advises that the host writes the caches."""
    return rule.changes.get(CONTRACT) == "readonly"


def by_longest_axis(planner: Planner, target: Target) -> LayoutChoice:
    """As few slices of the head as the longest axis of a chip allows."""
    axis, rows = find_chip(target.chip).figure("axis"), planner.heads[-1].stop
    slices = -(-rows // int(axis.value))
    reason = f"{rows} rows; an axis has {axis.value:.0f} at most ({cite(axis)})"
    return {SLICES: slices}, reason


@dataclass(frozen=True)
class ChipLayout:
    """A layout of a plan on a chip."""

    chunks: int
    planner: Planner
    chip: Chip

    @cached_property
    def plan(self) -> Plan:
        return self.planner.plan()

    @property
    def largest(self) -> int:
        """Bytes of the largest program."""
        return max(shard.weight_bytes for shard in self.plan.shards)

    @property
    def small(self) -> bool:
        """Whether programs of this size were seen on the chip, and caches fit them."""
        try:
            return self.largest <= self.chip.figure("program_bytes").value
        except CetaneError:
            return False

    @property
    def held(self) -> bool:
        """Whether programs of this size and number were seen on the chip, and caches fit them."""
        return self.small and len(self.plan.functions) <= self.chip.figure("programs").value

    @cached_property
    def ms(self) -> float | None:
        """Predicted milliseconds of a decode step; None if nothing of the chip was measured."""
        step = predict(self.planner, self.chip, "decode")
        return None if step is None else step.ms


def by_known_programs(planner: Planner, target: Target) -> LayoutChoice:
    """The fastest layout whose programs a chip is known to hold. Of equals, one whose size no
    report doubts, then the fewest packages."""
    chip = find_chip(target.chip)
    tried = list(layouts(planner, chip))
    held = [one for one in tried if one.held]
    most = chip.figure("program_bytes")
    if not held:
        raise none_fits(planner, chip, tried)
    fastest = min((one.ms for one in held if one.ms is not None), default=0.0)
    near = [one for one in held if (one.ms or 0.0) <= NEAR * fastest]
    chosen = next((one for one in near if one.largest <= SAFE_CONSTANTS), near[0])
    speed = "" if chosen.ms is None else f"; predicted {chosen.ms:.2g} ms a token, the fastest"
    divided = most.value > SAFE_CONSTANTS
    doubt = f"; reports disagree beyond {SAFE_CONSTANTS / 1e6:.0f} MB" if divided else ""
    reason = (
        f"packages of {chosen.largest / 1e6:.1f} MB at most; {chip.name} is known to hold "
        f"{most.value / 1e6:.0f} MB ({cite(most)}){doubt}{speed}"
    )
    return {KIND: "chunks", CHUNKS: chosen.chunks}, reason


def none_fits(planner: Planner, chip: Chip, tried: Sequence[ChipLayout]) -> CetaneError:
    """The error of a chip that holds no layout: the limit that failed, and what helps."""
    finest = tried[-1].plan  # raises a better error if the caches of one layer alone are too large
    most, count = (chip.figure(name).value for name in ("program_bytes", "programs"))
    if small := [one for one in tried if one.small]:
        needed = min(len(one.plan.functions) for one in small)
        limit = f"{needed} programs of at most {most / 1e6:.0f} MB, and it holds {count:.0f}"
    else:
        least = max(shard.weight_bytes for shard in finest.shards)
        limit = f"a program of at least {least / 1e6:.0f} MB, and it holds {most / 1e6:.0f} MB"
    four_bits = override(planner.recipe, {"compression.default": FORMAT_OF_BITS[4]})
    smaller = layouts(Planner(planner.checkpoint, four_bits, planner), chip)
    return CetaneError(
        f"no number of packages fits {chip.name}: that takes {limit}",
        "take a smaller compression: --bits 4"
        if any(one.held for one in smaller)
        else "it does not fit in 4 bits either: take a smaller model or a larger chip",
    )


def layouts(planner: Planner, chip: Chip) -> Iterator[ChipLayout]:
    """Layouts with the layers in 1, 2, 4, ... packages, and in one for each. The head is apart."""
    layers = len({block.layer for block in planner.model.layers})
    counts = sorted({1 << power for power in range(layers.bit_length())} | {layers})
    for count in counts:
        recipe = override(planner.recipe, {KIND: "chunks", CHUNKS: count})
        yield ChipLayout(count, Planner(planner.checkpoint, recipe, planner), chip)


def by_free_drafts(planner: Planner, target: Target) -> LayoutChoice:
    """The widest verifying call that takes hardly longer than a step, if the recipe verifies. If
    none does, the one whose drafts pay at the smallest share of right tokens."""
    if planner.recipe.tokens.verify is None:
        return {}, ""
    chip = find_chip(target.chip)
    costs: list[DraftingTimes] = []
    for width in RANKED_WIDTHS:
        recipe = override(planner.recipe, {VERIFY: width})
        wide = Planner(planner.checkpoint, recipe, planner)
        call, step = predict(wide, chip, "verify"), predict(wide, chip, "decode")
        if call is None or step is None:
            return {}, ""
        cost = DraftingTimes(step.ms, call.ms, width)
        if cost.slowdown <= FREE:
            reason = f"predicted to take {cost.slowdown:.2f} steps; drafts of it are nearly free"
            return {VERIFY: width}, reason
        costs.append(cost)
    best = min(reversed(costs), key=lambda cost: cost.break_even_share() or 1.0)
    share = best.break_even_share()
    pays = (
        "no draft of any width can pay"
        if share is None
        else f"drafts pay if {share:.0%} of their tokens are right, the least of all widths"
    )
    return {VERIFY: best.width}, f"predicted to take {best.slowdown:.2f} steps; {pays}"


def predict(planner: Planner, chip: Chip, mode: Mode) -> Prediction | None:
    """The prediction of a mode's call; None if nothing of the chip was measured."""
    return Predictor(chip).predict(planner, mode) if chip.stream else None
