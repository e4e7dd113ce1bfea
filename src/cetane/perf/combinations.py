"""Combinations of layout, cache contract, format, width of a verifying call and context, with their
predicted speeds.

Combinations differ in fields of one recipe. The model's blocks are made once and shared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from cetane.errors import CetaneError
from cetane.families import RoutedBlock
from cetane.hardware.chips import Chip
from cetane.perf.predict import Prediction, Predictor
from cetane.planner import ModelSource, Planner
from cetane.schema.recipe import Recipe, parse_recipe
from cetane.schema.slots import CONTRACTS

RANKED_FORMATS = ("fp16", "int8-per-channel", "palette6-kmeans-group32", "palette4-kmeans-group32")
RANKED_CHUNKS = (2, 4, 8)
VERIFY = (2, 4, 8)
CONTEXTS = (512, 2048, 8192)
"""What is tried: formats, chunks of a model, tokens of a verifying call, and contexts."""


@dataclass(frozen=True)
class Combination:
    """One combination and its predictions. `refused` is the reason why it cannot run, or None."""

    layout: str
    contract: str
    format: str
    verify: int
    context: int
    recipe: Recipe
    decode: Prediction
    verifying: Prediction
    refused: str | None

    @property
    def slowdown(self) -> float:
        """The time of a verifying call, in decode steps."""
        return self.verifying.ms / self.decode.ms


class Combinations:
    """The combinations around a recipe, whose other fields stay unchanged."""

    def __init__(self, checkpoint: ModelSource, recipe: Recipe, chip: Chip) -> None:
        self.checkpoint, self.recipe = checkpoint, recipe
        self.base = Planner(checkpoint, recipe)
        self.predictor = Predictor(chip)
        self.limits = {name: chip.figure(name).value for name in ("program_bytes", "programs")}
        self._planners: dict[str, Planner] = {}

    def layouts(self) -> dict[str, dict[str, Any]]:
        """Layouts by name, also with routed experts if the model has experts."""
        layers = len({block.layer for block in self.base.model.layers})
        layouts: dict[str, dict[str, Any]] = {"per-block": {"kind": "per-block"}}
        if len(self.base.model.layers) == layers:  # a block is a layer
            layouts = {}
        layouts["per-layer"] = {"kind": "per-layer"}
        for chunks in RANKED_CHUNKS:
            if chunks < layers:
                layouts[f"{chunks} chunks"] = {"kind": "chunks", "chunks": chunks}
        layouts["single"] = {"kind": "single"}
        routing = [b for b in self.base.model.layers if isinstance(b, RoutedBlock)]
        if routing and all(block.routable for block in routing):
            for name, layout in list(layouts.items()):
                layouts[f"{name}, routed"] = layout | {"routed": ("decode", "verify")}
        return layouts

    def contexts(self) -> list[int]:
        """The recipe's context, and others within the model's own."""
        known = {c for c in CONTEXTS if c <= self.base.model.max_context}
        return sorted({self.recipe.cache.context} | known)

    def __len__(self) -> int:
        """The number of combinations that are tried. Some have no plan."""
        layouts = len(self.layouts()) * len(CONTRACTS) * len(RANKED_FORMATS)
        return layouts * len(self.contexts()) * len(VERIFY)

    def __iter__(self) -> Iterator[Combination]:
        for (name, layout), contract, form, context in product(
            self.layouts().items(), CONTRACTS, RANKED_FORMATS, self.contexts()
        ):
            decode: Prediction | None = None
            for verify in VERIFY:
                made = self.planner(layout, contract, form, verify, context)
                if made is None:
                    continue
                if decode is None:  # neither depends on the verifier's width
                    decode = self.predictor.predict(made, "decode")
                    refused = self.refusal(made)
                verifying = self.predictor.predict(made, "verify")
                yield Combination(
                    name, contract, form, verify, context, made.recipe, decode, verifying, refused
                )

    def planner(
        self, layout: dict[str, Any], contract: str, form: str, verify: int, context: int
    ) -> Planner | None:
        """The planner of the recipe with these fields replaced; None if it has no plan.

        It shares blocks with a planner of the same compression.
        """
        content = self.recipe.model_dump()
        content["layout"] = layout
        alone = {"contract": contract, "context": context, "capacities": ()}
        content["cache"] = content["cache"] | alone
        content["tokens"] = content["tokens"] | {"verify": verify, "shapes": "static"}
        content["compression"] = {"default": form} | {
            table: {key: value for key, value in content["compression"][table].items()
                    if value == "fp16"}  # what the recipe found too delicate
            for table in ("types", "names")
        }  # fmt: skip
        try:
            recipe = parse_recipe(content, "sweep")
            made = Planner(self.checkpoint, recipe, self._planners.get(form, self.base))
        except CetaneError:  # a format that does not divide a weight, a context too small, ...
            return None
        self._planners.setdefault(form, made)
        return made

    def refusal(self, planner: Planner) -> str | None:
        """The reason why the plan cannot be programs, or cannot run on the chip; None if it can."""
        try:
            for segment in planner.arrangement.order:
                for cache in planner.memory.caches(segment, 1):
                    cache.form.inputs(cache, 1)
                    cache.form.states(cache)
        except CetaneError as error:
            return error.message
        for shard, blocks in planner.members.items():
            size = self.predictor.nbytes(planner, blocks)
            if size > self.limits["program_bytes"]:
                most = self.limits["program_bytes"]
                return f"{shard} has {size / 1e9:.2f} GB, {most / 1e9:.2f} at most"
        programs = sum(
            len(call.blocks) if call.routed else 1
            for mode in planner.recipe.tokens.by_mode()
            for call in planner.calls(mode)
        )
        if programs > self.limits["programs"]:
            return f"{programs} programs, {self.limits['programs']:.0f} at most"
        return None
