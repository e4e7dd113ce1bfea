"""The choice, before a build, of a compression that a recipe leaves to cetane
(`compression.default = "auto"`).

Candidates are judged one by one, the smallest first (`CandidateJudge`). The first candidate that
holds the recipe's promise, with a margin, is taken. Mixes of palettes are chosen in the same way,
where a recipe of few bits may have one (`compression.mix_to`).
"""

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from math import ceil
from typing import Any

from cetane.checkpoint import Checkpoint
from cetane.compress import AUTO, Selection
from cetane.compress.selection import NEXT, SMALLEST, UNFITTED
from cetane.errors import CetaneError
from cetane.families import Weight
from cetane.files import Progress, silent
from cetane.gates.compressions import check_memory
from cetane.gates.limits import limits
from cetane.pipeline.calibration import resolve_fitted, resolve_scale
from cetane.pipeline.candidate_judge import CandidateJudge
from cetane.pipeline.fitted_mixes import FittedMixes
from cetane.pipeline.judgement import MARGIN, allowance
from cetane.pipeline.mixed_parts import MixedPart, named, parts_of
from cetane.planner import Planner
from cetane.planner.weights import format_of
from cetane.schema.changes import decided, override, value_of
from cetane.schema.recipe import Recipe
from cetane.validation import Data

SMALL, LARGE, FP16 = SMALLEST, NEXT, "fp16"
"""Formats that are tried for all weights, in this order."""
PALETTES_AND_INT8 = "a mix of 6-bit palettes and int8"
"""The name of the candidate that mixes `SMALL` and `LARGE`. It is tried between them."""
COMPARED_TOKENS = 96
"""Tokens on which the parts of a mix are compared."""
DEFAULT_FORMAT, ROW_FORMAT = "compression.default", "embedding.format"
"""Keys of the values that are chosen: the formats of weights, and of the host's tables."""


def resolve_recipe(checkpoint: Checkpoint, recipe: Recipe, progress: Progress = silent) -> Recipe:
    """The recipe with a value in place of every `auto`, and why: the first of `resolutions`."""
    return with_layout(next(resolutions(checkpoint, recipe, progress)))


def with_layout(recipe: Recipe) -> Recipe:
    """The recipe with the layout that `auto` means where no chip is named."""
    return override(recipe, {"layout.kind": "chunks"}) if recipe.layout.kind == "auto" else recipe


def resolutions(
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: Progress = silent,
    budget: int | None = None,
) -> Iterator[Recipe]:
    """Give the recipe with a value in place of every `auto`, once for every choice of them.

    A recipe without `auto` comes back as it is, but for constants that its method fits. First come
    the compressions that hold the recipe's promise, the smallest first. The last one is the nearest
    to the model, even if it breaks the promise: fp16, or the mix of the most bits that the recipe
    allows. The recipe's own formats by type and by name stay. `budget` is the most bytes of weights
    and tables; CetaneError for a choice that takes more.
    """
    mixing = recipe.compression.mix_to is not None and recipe.compression.fitted is None
    if mixing and recipe.compression.method == "tuned":  # tuning takes long: only choices are tuned
        from cetane.fitting.fit import check_size

        check_size(checkpoint)
        rounded = override(recipe, {"compression.method": "gptq"})
        for choice in resolutions(checkpoint, rounded, progress, budget):
            yield tuned(checkpoint, choice, progress)
        return
    if mixing:  # refuses, before the long fitting, a model that is too large to judge afterwards
        check_memory(Planner(checkpoint, recipe))
    recipe = resolve_fitted(checkpoint, resolve_scale(checkpoint, recipe, progress), progress)
    if not (recipe.compression.auto or recipe.embedding.format == AUTO or mixing):
        check_budget(Planner(checkpoint, recipe), budget, "the recipe's formats take")
        yield recipe
        return
    choosing = CompressionChoice(checkpoint, recipe, progress)
    for rows in choosing.rows():
        if rows != FP16 and not choosing.holds(f"{rows} rows alone", choosing.alone(rows)):
            continue
        for name, candidate in choosing.candidates(rows):
            if choosing.holds(name, candidate):
                what = f"the smallest that is {recipe.quality} takes"
                check_budget(Planner(checkpoint, candidate, choosing.planner), budget, what)
                yield choosing.chosen(name, candidate)
        if not recipe.compression.auto:
            break  # finer rows change little: weights of few bits err more than rows do
    name, nearest = choosing.nearest(rows)
    what = f"nothing smaller is proven {recipe.quality}, and the nearest to the model takes"
    check_budget(Planner(checkpoint, nearest, choosing.planner), budget, what)
    yield choosing.chosen(name, nearest)  # even if it breaks the promise


def tuned(checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> Recipe:
    """A recipe whose constants are tuned where they were rounded."""
    values = {"compression.method": "tuned", "compression.fitted": None}
    return resolve_fitted(checkpoint, override(recipe, values), progress)


def check_budget(planner: Planner, budget: int | None, what: str) -> None:
    """CetaneError for a plan whose weights and tables take more than `budget` bytes; None is no
    limit. `what` says in the message whose size it is."""
    if budget is None:
        return
    plan = planner.plan()
    size = plan.weight_bytes + plan.embedding_bytes
    if size > budget:
        needed = ceil(size / 1e5) / 10  # rounded up, so that it is enough as a budget
        raise CetaneError(
            f"--budget {budget / 1e6:.10g}MB: {what} {needed:.1f} MB",
            "promise less (--quality usable), name fewer bits, or choose fewer tokens for the head "
            "(cetane vocabulary)",
        )


class Harms(Data):
    """What a mix may cost, as KL in nats."""

    rest: float
    """With all weights in the larger format."""
    parts: tuple[float, ...]
    """What each part of the weights adds in the smaller format."""


class CompressionChoice:
    """The candidates for one model, the smallest first."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> None:
        self.checkpoint, self.recipe, self.progress = checkpoint, recipe, progress
        self.planner = Planner(checkpoint, recipe)
        self.judge = CandidateJudge(checkpoint, recipe, progress)
        self.fitted = FittedMixes(self.planner)
        self.refused: dict[str, str] = {}
        """Why candidates do not hold the promise, by name."""

    def rows(self) -> tuple[str, ...]:
        """Formats of the host's tables to try, the smallest first."""
        asked = self.recipe.embedding.format
        return ("int8", FP16) if asked == AUTO else (asked,)

    def candidates(self, rows: str) -> Iterator[tuple[str, Recipe]]:
        """Candidates below fp16 by name, the smallest first. Each is made when it is asked for: a
        caller takes the next one only if the last one failed."""
        if not self.recipe.compression.auto:
            yield self.recipe.compression.default, self.candidate(rows, None)
            yield from self.mixes(rows)
            return
        yield SMALL, self.candidate(rows, SMALL)
        mix = self.larger(rows)
        if mix:
            yield (
                PALETTES_AND_INT8,
                override(self.candidate(rows, SMALL), {"compression.names": mix}),
            )
        yield LARGE, self.candidate(rows, LARGE)

    def alone(self, rows: str) -> Recipe:
        """The recipe with a format of the tables, and weights in fp16."""
        unfitted = UNFITTED | {"names": {}, "default": FP16}
        values = {} if self.recipe.compression.auto else unfitted
        keyed = {f"compression.{key}": value for key, value in values.items()}
        return override(self.candidate(rows, FP16), keyed)

    def nearest(self, rows: str) -> tuple[str, Recipe]:
        """The candidate that is nearest to the model, with the last format of the tables that was
        tried."""
        if self.recipe.compression.auto:
            return FP16, self.candidate(rows, FP16)
        return list(self.candidates(rows))[-1]

    def candidate(self, rows: str, default: str | None) -> Recipe:
        """The recipe with formats of the tables and of the weights that it leaves to cetane."""
        values: dict[str, Any] = {"embedding.format": rows}
        if default and self.recipe.compression.auto:
            values[DEFAULT_FORMAT] = default
            if default == SMALL and self.uneven:
                values["compression.names"] = self.uneven | self.recipe.compression.names
        return override(self.recipe, values)

    @cached_property
    def uneven(self) -> dict[str, str]:
        """The larger format, by patterns of names, for weights that the smaller one does not
        divide."""
        compression = self.recipe.compression
        weights = [w for block in self.planner.blocks for _, w in block.weights() if w.kind]
        odd = {w.name for w in weights if format_of(w, compression).name == LARGE
               and compression.format_for(w.name, str(w.kind)).name == SMALL}  # fmt: skip
        patterns = {name: re.sub(r"^.*?[.][0-9]+[.]", "*.", name) for name in odd}
        matched = {one: {w.name for w in weights if fnmatchcase(w.name, one)}
                   for one in set(patterns.values())}  # fmt: skip
        return {(one if matched[one] <= odd else name): LARGE
                for name, one in sorted(patterns.items())}  # fmt: skip

    def chosen(self, name: str, candidate: Recipe) -> Recipe:
        """A candidate with the reasons for what was chosen; gives the weights' memory back."""
        judgement, quality = self.judge(candidate), self.recipe.quality
        said = f"{name}, {'' if judgement.passed else 'not '}{quality}: {judgement}"
        if name == SMALL and self.uneven:
            said += f"; {LARGE} for weights that it does not divide"
        if self.fitted.unmixed is not None and not judgement.passed:
            said += f"; {self.fitted.unmixed}"
        if smaller := [why for other, why in self.refused.items() if other != name]:
            said += f"; smaller is not proven {quality}: {'; '.join(smaller)}"
        self.judge.release()
        chosen = [key for key in (DEFAULT_FORMAT, ROW_FORMAT) if value_of(self.recipe, key) == AUTO]
        if self.recipe.compression.mix_to is not None:
            chosen.append(DEFAULT_FORMAT)
        return decided(candidate, {}, dict.fromkeys(chosen, said))

    def holds(self, name: str, candidate: Recipe) -> bool:
        """Whether a candidate holds what the recipe promises; notes it where it does not."""
        judgement = self.judge(candidate)
        if not judgement.passed:
            self.refused[name] = f"{name}: {judgement.missed}"
        return judgement.passed

    def larger(self, rows: str) -> dict[str, str]:
        """The larger of a mix's formats, by patterns of names, for the parts that keep it.

        Groups take the smaller format while the promise has room for their KL, the cheapest for a
        saved byte first. Empty if all parts take it, or none.
        """
        parts, large = self.parts(), self.candidate(rows, LARGE)
        harms = self.judge.kept(Harms, large, lambda: self.harms(parts, large))
        room = MARGIN * limits().quality[self.recipe.quality].kl - harms.rest
        small: set[int] = set()
        costs = [cost / part.saved(SMALL, LARGE)
                 for cost, part in zip(harms.parts, parts, strict=True)]  # fmt: skip
        for index in sorted(range(len(parts)), key=costs.__getitem__):
            if harms.parts[index] <= room:
                small.add(index)
                room -= harms.parts[index]
        if not 0 < len(small) < len(parts):
            return {}
        others = [part for index, part in enumerate(parts) if index not in small]
        return named(others, LARGE) | self.candidate(rows, SMALL).compression.names

    def mixes(self, rows: str) -> Iterator[tuple[str, Recipe]]:
        """Mixes in place of the recipe's uniform palettes, by name.

        One has hardly more bits. The next has as many as the judgement of the uniform palettes asks
        for, and the last as many as the recipe allows.
        """
        found = self.fitted.better
        if not found:
            return
        uniform = self.candidate(rows, None)
        left = allowance(self.judge(uniform))
        enough = next((mix for mix in found if mix.harm <= left), found[-1])
        for mix in dict.fromkeys((found[0], enough, found[-1])):
            name = mix.described(self.recipe.compression.default)
            yield name, resolve_fitted(self.checkpoint, mix.given(uniform), self.progress)

    def parts(self) -> list[MixedPart]:
        """The weights whose format the recipe leaves to cetane, as parts by depth. Errors of early
        layers cost most, whatever the kind (Gemma 3 270M: KL of 0.22, 0.03 and 0.01 by thirds)."""
        small, large = (self.candidate(FP16, name).compression for name in (SMALL, LARGE))

        def left_open(weight: Weight) -> str | None:
            name, kind = weight.name, str(weight.kind)
            return "" if small.format_for(name, kind) != large.format_for(name, kind) else None

        return parts_of(self.planner, left_open)

    def harms(self, parts: Sequence[MixedPart], large: Recipe) -> Harms:
        """The KL of every part in the smaller format, with all else in the larger one."""
        model = self.judge.model
        model.compress(Selection())
        model.store_rows("fp16")
        truth = list(model.read(self.judge.tokens[:COMPARED_TOKENS]))
        model.compress(large.compression)
        model.store_rows(large.embedding.rows)
        rest = self.judge.compare(truth).mean("kl")
        costs = []
        for index, part in enumerate(parts):
            self.progress(f"part {index + 1} of a mix", index, len(parts))
            names = dict.fromkeys(part.patterns, SMALL)
            mixed = large.compression.model_copy(update={"names": large.compression.names | names})
            model.compress(mixed)
            costs.append(max(0.0, self.judge.compare(truth).mean("kl") - rest))
        return Harms(rest=rest, parts=tuple(costs))


def known_to_hold(checkpoint: Checkpoint, recipe: Recipe, formats: Sequence[str]) -> set[str]:
    """The formats that hold the recipe's promise as its default: fp16, and those of `formats` that
    an earlier port judged so on this model. Reads no weight and judges nothing."""
    unfitted = override(recipe, {f"compression.{key}": value for key, value in UNFITTED.items()})
    choosing, known = CompressionChoice(checkpoint, unfitted, silent), {FP16}
    for name, rows in product(formats, choosing.rows()):
        judgement = choosing.judge.known(
            override(unfitted, {DEFAULT_FORMAT: name, ROW_FORMAT: rows})
        )
        if judgement is not None and judgement.passed:
            known.add(name)
    return known
