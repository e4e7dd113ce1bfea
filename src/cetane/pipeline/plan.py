"""What a build would make, and how fast a chip is predicted to run it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.errors import CetaneError
from cetane.files import Progress, silent
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.rule import load_rules
from cetane.gates.residency.sketch import sketch
from cetane.gates.residency.store import summary
from cetane.gates.residency.target import Target, oldest_system
from cetane.hardware.chips import DEFAULT_CHIP, Chip, find_chip
from cetane.perf.breakeven import DraftingTimes
from cetane.perf.capacities import CapacityCost, capacity_costs
from cetane.perf.combinations import CONTEXTS, RANKED_FORMATS, Combination, Combinations
from cetane.perf.predict import Prediction, Predictor
from cetane.pipeline.chip_layout import asks_for_readonly, recipe_for_chip
from cetane.pipeline.compression_choice import known_to_hold
from cetane.pipeline.request import Request, make_request
from cetane.planner import Planner
from cetane.schema.plan import Plan
from cetane.schema.recipe import Recipe

if TYPE_CHECKING:  # explanations need a second to import, and only failures have one
    from cetane.gates.explain import Explanation


def plan(
    model: str | Path,
    *,
    recipe: str | Path | Recipe = "default",
    context: int | None = None,
    bits: int | None = None,
    changes: Mapping[str, Any] | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
) -> Plan:
    """Resolve a recipe for a checkpoint: shards, functions, inputs, outputs, states and bytes.

    Reads no weights. `context`, `bits` and `changes` replace values of the recipe; `lora` and
    `adapters` are as in `port`. CetaneError for whatever `port` would refuse.

    >>> cetane.plan(model, recipe=recipe, context=512).recipe.cache.context
    512
    """
    request = make_request(model, recipe, context, bits, changes, lora=lora, adapters=adapters)
    return request.planner.plan()


def planner_for(request: Request, target: Target | None) -> Planner:
    """The planner with which a port of the request begins: for a chip, of a layout that fits it."""
    if target is None:
        return request.planner
    recipe = recipe_for_chip(request.planner, target, request.named)
    return Planner(request.checkpoint, recipe, request.planner)


@dataclass(frozen=True)
class PlannedResidency:
    """Where rules put the weights and caches of a plan on a target. A port audits its first shards,
    which have the ops between these too."""

    planner: Planner
    target: Target

    @cached_property
    def audit(self) -> Audit:
        """The audit of the plan's sketch."""
        return audit(sketch(self.planner), self.target)

    @cached_property
    def explanation(self) -> "Explanation | None":
        """Why a port would be refused, and what mends it; None where rules do not refuse it."""
        if self.audit.passed:
            return None
        from cetane.gates.explain import explain_residency

        return explain_residency(self.audit, self.planner.plan())

    @property
    def newer_system(self) -> int | None:
        """The number of the oldest system that loads the port, if the target's does not."""
        oldest = oldest_system(self.planner.recipe.target.deployment)
        return oldest if self.target.os < oldest else None

    def as_json(self) -> dict[str, Any]:
        """The verdict as a bundle keeps it, and its explanation."""
        why = self.explanation
        told = None if why is None else why.model_dump(mode="json")
        return summary(self.audit) | {"explanation": told}


@dataclass(frozen=True)
class Forecast:
    """The predicted speed of a plan on a chip; nothing here is measured."""

    planner: Planner
    chip: Chip
    predictor: Predictor | None
    """None for a chip of which nothing was measured: then there is no prediction either."""

    @property
    def context(self) -> int:
        """The recipe's context, in tokens."""
        return self.planner.recipe.cache.context

    @cached_property
    def held(self) -> int:
        """Bytes of weights and caches."""
        plan = self.planner.plan()
        return plan.weight_bytes + plan.kv_bytes[self.context]

    @cached_property
    def decode(self) -> Prediction | None:
        """A plain step at the recipe's context."""
        if self.predictor is None:
            return None
        return self.predictor.predict(self.planner, "decode", self.context)

    @cached_property
    def predictions(self) -> list[Prediction]:
        """Every mode at the recipe's context and capacities, and at other contexts that its caches
        can have; of flexible shapes only the default, since the ANE runs no other (coremltools
        #2370)."""
        if self.predictor is None:
            return []
        tokens_of = self.planner.recipe.tokens.by_mode()
        flexible = self.planner.recipe.tokens.shapes == "range"
        asked = {self.context, *self.planner.smaller}
        found = []
        for mode, context in product(tokens_of, sorted(asked.union(CONTEXTS))):
            tokens = tokens_of[mode]
            if tokens <= context <= self.planner.model.max_context and not (
                flexible and tokens > 1
            ):
                # A port has only the contexts that were asked for: only these may be refused.
                with nullcontext() if context in asked else suppress(CetaneError):
                    found.append(self.predictor.predict(self.planner, mode, context))
        return found

    @cached_property
    def capacities(self) -> list[CapacityCost]:
        """The price of every capacity, ascending; the last is the recipe's context."""
        return [] if self.predictor is None else capacity_costs(self.predictor, self.planner)

    @cached_property
    def speculation(self) -> DraftingTimes | None:
        """A verifying call against plain steps at the recipe's context, if there is one."""
        here = {p.mode: p for p in self.predictions if p.context == self.context}
        if "verify" not in here:
            return None
        return DraftingTimes(here["decode"].ms, here["verify"].ms, here["verify"].tokens)

    def as_json(self) -> dict[str, Any]:
        """Predictions, their errors on measured models, and the rates behind them."""
        spec = self.speculation
        memory = {"needed": self.held, "most": self.chip.most_memory}
        if self.predictor is None:
            return {"chip": self.chip.id, "memory": memory, "modes": [], "speculation": None,
                    "rates": None}  # fmt: skip
        return {
            "chip": self.chip.id,
            "memory": memory,
            "modes": [prediction_json(prediction) for prediction in self.predictions],
            "speculation": None
            if spec is None
            else {
                "width": spec.width,
                "slowdown": spec.slowdown,
                "feasible": spec.feasible,
                "break_even_share": spec.break_even_share(),
                "break_even_chance": spec.break_even_chance(),
            },
            "capacities": [
                {
                    "tokens": cost.tokens,
                    "functions": cost.functions,
                    "decode_ms": cost.decode.ms,
                    "crossing_ms": cost.crossing,
                    "break_even": cost.break_even,
                }
                for cost in self.capacities
            ],
            "errors": self.predictor.fit.errors.model_dump(),
            "rates": {name: rate.model_dump() for name, rate in self.predictor.rates.items()},
        }


def forecast(planner: Planner, chip: str = DEFAULT_CHIP) -> Forecast:
    """The predicted speed of a plan on a chip, by the chip's id, as far as anything of the chip was
    measured; CetaneError for no such chip."""
    profile = find_chip(chip)
    return Forecast(planner, profile, Predictor(profile) if profile.stream else None)


def forecast_json(forecast: Forecast) -> dict[str, Any]:
    """A plain step on a chip; the chip alone where nothing is predicted."""
    decode = forecast.decode
    return {"chip": forecast.chip.id} | ({} if decode is None else prediction_json(decode))


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """A prediction as a JSON object; `low` to `high` is its interval in milliseconds."""
    return {
        "mode": prediction.mode,
        "tokens": prediction.tokens,
        "context": prediction.context,
        "ms": prediction.ms,
        "low": prediction.low,
        "high": prediction.high,
        "tok_s": prediction.tok_s,
        "binds": prediction.binds,
        "terms_ms": dict(prediction.terms),
    }


@dataclass(frozen=True)
class Ranking:
    """Layouts, contracts, formats, widths and contexts of one model on one chip."""

    chip: Chip
    context: int
    """The recipe's own."""
    combinations: Sequence[Combination]
    fastest: Combination | None
    """The fastest combination at the recipe's own context that may be recommended. The chip holds
    it, no rule refuses it, and none asks for another cache contract. The golden gate is known to
    pass it: it is in fp16, or in a format that was judged on this model. None if there is no such
    combination."""

    @cached_property
    def held(self) -> list[Combination]:
        """Combinations that the chip holds, the fastest first."""
        return sorted((c for c in self.combinations if c.refused is None), key=slowness)

    @cached_property
    def refused(self) -> list[Combination]:
        """Combinations that the chip does not hold, or that a rule refuses, the fastest first."""
        return sorted((c for c in self.combinations if c.refused is not None), key=slowness)

    def as_json(self) -> dict[str, Any]:
        """All combinations, those that the chip does not hold after those that it does."""
        fastest = self.fastest
        return {
            "chip": self.chip.id,
            "fastest": None if fastest is None else combination_json(fastest),
            "combinations": [combination_json(c) for c in (*self.held, *self.refused)],
        }


def slowness(combination: Combination) -> tuple[float, float]:
    """Milliseconds of a decode step, then decode steps for each token of a verifying call."""
    return combination.decode.ms, combination.slowdown / combination.verify


def combination_json(combination: Combination) -> dict[str, Any]:
    """A combination as a JSON object, with the reason for which it is refused, if it is."""
    return {
        "layout": combination.layout,
        "contract": combination.contract,
        "format": combination.format,
        "verify": combination.verify,
        "context": combination.context,
        "refused": combination.refused,
        "decode": prediction_json(combination.decode),
        "verifying": prediction_json(combination.verifying),
        "slowdown": combination.slowdown,
    }


def rank(request: Request, target: Target, progress: Progress = silent) -> Ranking:
    """Predict every combination of layout, cache contract, format, width and context.

    CetaneError for a chip of which nothing was measured.
    """
    profile, context = find_chip(target.chip), request.recipe.cache.context
    space = Combinations(request.checkpoint, request.recipe, profile)
    combinations = []
    for index, combination in enumerate(space):
        if index % 200 == 0:
            progress(combination.layout, index, len(space))
        combinations.append(combination)
    promised = known_to_hold(request.checkpoint, request.recipe, RANKED_FORMATS)
    refused: dict[tuple[str, str, str, int], str] = {}
    fastest = None
    for one in sorted(combinations, key=slowness):
        if one.refused or one.context != context or one.format not in promised:
            continue
        planner = Planner(request.checkpoint, one.recipe, request.planner)
        audited = audit(sketch(planner), target)
        if not audited.passed:
            refused[one.layout, one.contract, one.format, one.verify] = audited.reasons[0]
        elif not any(asks_for_readonly(load_rules()[id]) for id in audited.severities):
            fastest = one
            break
    return Ranking(profile, context, [by_rules(one, refused) for one in combinations], fastest)


def by_rules(one: Combination, refused: Mapping[tuple[str, str, str, int], str]) -> Combination:
    """A combination with the reason for which the rules refuse it, if they were asked and do."""
    why = refused.get((one.layout, one.contract, one.format, one.verify))
    return one if why is None or one.refused else replace(one, refused=why)
