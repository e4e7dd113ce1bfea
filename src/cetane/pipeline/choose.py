"""The compression that a recipe leaves to cetane (`compression.default = "auto"`), before a build.

Candidates are judged in turn, the smallest first, on the authored modules and a text, by the golden
gate's own checks. The first that holds what the recipe promises, with a margin, is taken. So is the
mix of palettes that a recipe of few bits may have (`compression.mix_to`).
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cached_property
from importlib import resources
from itertools import product
from typing import Any, TypeVar

import numpy as np

from cetane.checkpoint import Checkpoint
from cetane.compress import AUTO, Palette, Selection, parse_format
from cetane.compress.select import NEXT, SMALLEST, UNFITTED
from cetane.errors import CetaneError
from cetane.families import Weight
from cetane.files import Progress, read_json, silent, write_json
from cetane.gates.compressions import Judge, Window, check_memory, plain
from cetane.gates.limits import limits
from cetane.gates.probes import text_tokens
from cetane.gates.quality import Agreement
from cetane.gates.reference import RESIDENT
from cetane.gates.verdict import Check
from cetane.pipeline.calibration import resolve_fitted, resolve_scale
from cetane.pipeline.mixed_parts import Mix, MixedPart, best_mix, named, parts_of
from cetane.planner import Planner
from cetane.planner.encoding import can_be_fitted
from cetane.planner.weights import format_of
from cetane.schema.manifest import producers
from cetane.schema.recipe import Recipe, decided, override, value_of
from cetane.store import kept as store
from cetane.tasks.task import task_key
from cetane.validation import Data, validated

Kept = TypeVar("Kept", bound=Data)

SMALL, LARGE = SMALLEST, NEXT
NEAREST, MIX = "fp16", "a mix of 6-bit palettes and int8"
"""What is tried for all weights, the smallest first; between the first two, a mix of them."""
MARGIN = 0.8
"""The part of every limit that a candidate may use, since the gate judges another text."""
NEAR, FINER = 0.1, 0.05
"""Bits a weight beyond the default's of the first mix, and between those that are predicted."""
WINDOW = 128
"""Tokens that are judged together, in one call: a large vocabulary's logits take 134 MB."""
BRIEF = 96
"""Tokens on which the parts of a mix are compared."""
KEY, ROWS = "compression.default", "embedding.format"
UNPREDICTED = (
    f"no mix: what weights cost is predicted by gptq alone, and up to {RESIDENT >> 30} GiB of fp32"
)
FILE = "figure.json"
DECIDING = {"family", "embedding", "head", "quality", "compression"}
"""Tables of a recipe that a judgement depends on, beside the caches that it is made with."""


class Judgement(Data):
    """What a candidate costs, as the golden gate's checks."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether every check holds, with the margin."""
        return all(holds(check) for check in self.checks)

    def __str__(self) -> str:
        """The figures and their limits, in one line."""
        return ", ".join(map(shown, self.checks))

    @property
    def missed(self) -> str:
        """The figures that leave too little room, in one line."""
        return ", ".join(shown(check) for check in self.checks if not holds(check))


def shown(check: Check) -> str:
    """A figure, its interval if it has one, and its limit."""
    between = "" if check.interval is None else " ({:.3g} to {:.3g})".format(*check.interval)
    return f"{check.name.partition(': ')[2]} {check.value:.3g}{between}, limit {check.limit:g}"


def holds(check: Check) -> bool:
    """Whether a check leaves room to its limit: a share by its interval, others by the margin."""
    return check.passed if check.interval is not None else used(check) <= MARGIN


def used(check: Check) -> float:
    """The part of a limit that a figure takes; a compression that costs nothing takes none."""
    nothing = 1.0 if check.name.endswith("ratio") else 0.0
    return (check.value - nothing) / (check.limit - nothing)


def allowance(judgement: Judgement) -> float:
    """The part of its KL with which a compression would hold its promise, with the margin.

    Wrong choices go with the root of the KL. An interval narrows with them; that is left as room.
    """
    parts = [1.0]
    for check in judgement.checks:
        if check.interval is None:
            parts.append(MARGIN / max(used(check), MARGIN))
        else:
            wrong, reach = 1 - check.value, check.value - check.interval[0]
            most = min(MARGIN * (1 - check.limit), 1 - check.limit - reach)
            parts.append((max(most, 0.0) / max(wrong, 1e-9)) ** 2)
    return min(parts)


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
    """The recipe with a value in place of every `auto`, as often as there is another choice.

    A recipe without `auto` comes back as it is, without a pass over the model. The compressions are
    those that hold the recipe's promise, the smallest first. The last is the nearest to the model,
    whatever it costs: fp16, or the few bits with as many more as they may have. What the recipe
    says of types and names stays. `budget` is the most bytes of weights and tables: CetaneError
    where nothing so small holds the promise.
    """
    mixing = recipe.compression.mix_to is not None and recipe.compression.fitted is None
    if mixing and recipe.compression.method == "tuned":  # which takes long: only what is chosen is
        from cetane.fitting.fit import check_size

        check_size(checkpoint)
        rounded = override(recipe, {"compression.method": "gptq"})
        for choice in resolutions(checkpoint, rounded, progress, budget):
            yield tuned(checkpoint, choice, progress)
        return
    if mixing:  # what is fitted will be judged, and fitting takes long
        check_memory(Planner(checkpoint, recipe))
    recipe = resolve_fitted(checkpoint, resolve_scale(checkpoint, recipe, progress), progress)
    if not (recipe.compression.auto or recipe.embedding.format == AUTO or mixing):
        check_budget(Planner(checkpoint, recipe), budget, "the recipe's formats take")
        yield recipe
        return
    bench = Bench(checkpoint, recipe, progress)
    for rows in bench.rows():
        if rows != NEAREST and not bench.holds(f"{rows} rows alone", bench.alone(rows)):
            continue
        for name, candidate in bench.candidates(rows):
            if bench.holds(name, candidate):
                what = f"the smallest that is {recipe.quality} takes"
                check_budget(Planner(checkpoint, candidate, bench.planner), budget, what)
                yield bench.chosen(name, candidate)
        if not recipe.compression.auto:
            break  # few bits err more than rows that hold the promise alone
    name, nearest = bench.nearest(rows)
    what = f"nothing smaller is proven {recipe.quality}, and the nearest to the model takes"
    check_budget(Planner(checkpoint, nearest, bench.planner), budget, what)
    yield bench.chosen(name, nearest)  # whatever it costs


def tuned(checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> Recipe:
    """A recipe whose constants are tuned where they were rounded."""
    values = {"compression.method": "tuned", "compression.fitted": None}
    return resolve_fitted(checkpoint, override(recipe, values), progress)


def check_budget(planner: Planner, budget: int | None, what: str) -> None:
    """CetaneError for a plan that takes more than `budget` bytes, and `what` that is; None is no
    limit."""
    if budget is None:
        return
    plan = planner.plan()
    size = plan.weight_bytes + plan.embedding_bytes
    if size > budget:
        raise CetaneError(
            f"--budget {budget / 1e6:.0f} MB: {what} {size / 1e6:.0f} MB",
            "promise less (--quality usable), name fewer bits, or choose fewer tokens for the head "
            "(cetane vocabulary)",
        )


class Harms(Data):
    """What a mix may cost: KL with all weights in the larger format, and what each group adds."""

    rest: float
    groups: tuple[float, ...]


class Bench:
    """A model under candidates, all judged on one text; judgements stay in the store."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> None:
        self.checkpoint, self.recipe, self.progress = checkpoint, recipe, progress
        self.planner = Planner(checkpoint, recipe)
        content = (resources.files("cetane") / "data" / "texts" / "english.txt").read_text("utf-8")
        ask = limits().evidence
        count = ask.positions if recipe.compression.mix_to is None else ask.most
        """Where few bits are near to the limit, little text decides nothing."""
        self.tokens = text_tokens(checkpoint.tokenizer, count, content)
        self.refused: dict[str, str] = {}
        """Why candidates do not hold the promise, by name."""

    @cached_property
    def model(self) -> Judge:
        self.progress("weights to choose by", 0, 1)
        return Judge(self.checkpoint, self.recipe, WINDOW)

    @cached_property
    def truth(self) -> list[Window]:
        """What the weights in fp16 make of the text."""
        self.model.compress(Selection())
        self.model.store_rows("fp16")
        return list(self.model.read(self.tokens))

    def rows(self) -> tuple[str, ...]:
        """Formats of the host's tables to try, the smallest first."""
        asked = self.recipe.embedding.format
        return ("int8", NEAREST) if asked == AUTO else (asked,)

    def candidates(self, rows: str) -> Iterator[tuple[str, Recipe]]:
        """What is between the smallest and fp16, by name; the caller goes on while they fail."""
        if not self.recipe.compression.auto:
            yield self.recipe.compression.default, self.candidate(rows, None)
            yield from self.mixes(rows)
            return
        yield SMALL, self.candidate(rows, SMALL)
        mix = self.larger(rows)
        if mix:
            yield MIX, override(self.candidate(rows, SMALL), {"compression.names": mix})
        yield LARGE, self.candidate(rows, LARGE)

    def alone(self, rows: str) -> Recipe:
        """The recipe with a format of the tables, and weights in fp16."""
        unfitted = UNFITTED | {"names": {}, "default": NEAREST}
        values = {} if self.recipe.compression.auto else unfitted
        keyed = {f"compression.{key}": value for key, value in values.items()}
        return override(self.candidate(rows, NEAREST), keyed)

    def nearest(self, rows: str) -> tuple[str, Recipe]:
        """The candidate that is nearest to the model, with the last format of the tables that was
        tried."""
        if self.recipe.compression.auto:
            return NEAREST, self.candidate(rows, NEAREST)
        return list(self.candidates(rows))[-1]

    def candidate(self, rows: str, default: str | None) -> Recipe:
        """The recipe with formats of the tables and of the weights that it leaves to cetane."""
        values: dict[str, Any] = {"embedding.format": rows}
        if default and self.recipe.compression.auto:
            values[KEY] = default
            if default == SMALL and self.uneven:
                values["compression.names"] = self.uneven | self.recipe.compression.names
        return override(self.recipe, values)

    @cached_property
    def uneven(self) -> dict[str, str]:
        """The larger format, by name, for weights that the smaller one does not divide."""
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
        if self.cannot_mix and not judgement.passed:
            said += f"; {UNPREDICTED}"
        if smaller := [why for other, why in self.refused.items() if other != name]:
            said += f"; smaller is not proven {quality}: {'; '.join(smaller)}"
        self.__dict__.pop("model", None)
        self.__dict__.pop("truth", None)
        chosen = [key for key in (KEY, ROWS) if value_of(self.recipe, key) == AUTO]
        if self.recipe.compression.mix_to is not None:
            chosen.append(KEY)
        return decided(candidate, {}, dict.fromkeys(chosen, said))

    def holds(self, name: str, candidate: Recipe) -> bool:
        """Whether a candidate holds what the recipe promises; notes it where it does not."""
        judgement = self.judge(candidate)
        if not judgement.passed:
            self.refused[name] = f"{name}: {judgement.missed}"
        return judgement.passed

    def judge(self, candidate: Recipe) -> Judgement:
        """What a candidate costs, now or in an earlier port."""

        def measure() -> Judgement:
            self.progress(f"is {candidate.compression.default} {self.recipe.quality}", 0, 1)
            truth = self.truth
            self.model.compress(candidate.compression)
            self.model.store_rows(candidate.embedding.rows)
            return Judgement(checks=tuple(self.compare(truth).judge(self.recipe)))

        return self.kept(Judgement, candidate, measure)

    def compare(self, truth: Sequence[Window]) -> Agreement:
        """The model as it is now against what it made of some windows before."""
        plan = self.model.engine.plan
        agreement = Agreement(self.recipe, plan.choosable, plan.vocab)
        for before in truth:
            now, targets = self.model.window(before.tokens), np.asarray(before.tokens[1:])
            theirs = before.logits[:-1]
            if self.recipe.head.subset is not None:  # neither side has the tokens that it lacks
                theirs = self.model.predictions(theirs)
            agreement.add(now.logits[:-1], theirs, targets)
        return agreement

    def larger(self, rows: str) -> dict[str, str]:
        """The larger of a mix's formats, by name, for all weights but the groups that bear the
        smaller one best: as many as the promise has room for. Empty where that is all, or none."""
        groups, large = self.groups(), self.candidate(rows, LARGE)
        harms = self.kept(Harms, large, lambda: self.harms(groups, large))
        room = MARGIN * limits().quality[self.recipe.quality].kl - harms.rest
        small: set[int] = set()
        costs = [cost / part.saved(SMALL, LARGE)
                 for cost, part in zip(harms.groups, groups, strict=True)]  # fmt: skip
        for index in sorted(range(len(groups)), key=costs.__getitem__):
            if harms.groups[index] <= room:
                small.add(index)
                room -= harms.groups[index]
        if not 0 < len(small) < len(groups):
            return {}
        others = [group for index, group in enumerate(groups) if index not in small]
        return named(others, LARGE) | self.candidate(rows, SMALL).compression.names

    def mixes(self, rows: str) -> Iterator[tuple[str, Recipe]]:
        """Mixes in place of the recipe's uniform palettes, by name: one of hardly more bits, of as
        many as its judgement asks for, and of as many as the recipe allows."""
        most = self.recipe.compression.mix_to
        if most is None or self.recipe.compression.fitted is None:
            return
        least = parse_format(self.recipe.compression.default).bits + NEAR
        sizes = [*np.arange(least, most, FINER).tolist(), most]
        found = [mix for size in sizes if (mix := self.best_mix(size)) is not None]
        if not found:
            return
        uniform = self.candidate(rows, None)
        left = allowance(self.judge(uniform))
        enough = next((mix for mix in found if mix.harm <= left), found[-1])
        for mix in dict.fromkeys((found[0], enough, found[-1])):
            name = mix.described(self.recipe.compression.default)
            yield name, resolve_fitted(self.checkpoint, mix.given(uniform), self.progress)

    @property
    def cannot_mix(self) -> bool:
        """Whether the recipe allows a mix, but nothing says which weights cost most."""
        compression = self.recipe.compression
        return compression.mix_to is not None and not self.harmed[1]

    def best_mix(self, most: float) -> Mix | None:
        """The palettes of least predicted KL in place of the recipe's uniform ones, of at most so
        many bits a weight; None where none is better."""
        uniform = parse_format(self.recipe.compression.default)
        assert isinstance(uniform, Palette)
        parts, known = self.harmed
        return best_mix(parts, known, uniform, most)

    @cached_property
    def harmed(self) -> tuple[list[MixedPart], dict[str, float]]:
        """The parts whose weights' harms are known, and these harms."""
        fitted = self.recipe.compression.fitted
        known = {} if fitted is None else fitted.read().harms
        return [p for p in self.kinds() if all(w.name in known for w in p.weights)], known

    def kinds(self) -> list[MixedPart]:
        """The fitted weights of the recipe's default, by kind and by part of the layers."""
        compression = self.recipe.compression

        def kind_of(weight: Weight) -> str | None:
            form = compression.format_for(weight.name, str(weight.kind))
            raisable = form.name == compression.default and can_be_fitted(weight, form)
            return weight.name.rpartition(".")[0].rpartition(".")[2] if raisable else None

        return parts_of(self.planner, kind_of)

    def groups(self) -> list[MixedPart]:
        """The weights that the recipe leaves to cetane, by part of the layers: errors of early ones
        cost most, whatever the kind (Gemma 3 270M: KL of 0.22, 0.03 and 0.01 by thirds)."""
        small, large = (self.candidate(NEAREST, name).compression for name in (SMALL, LARGE))

        def left_open(weight: Weight) -> str | None:
            name, kind = weight.name, str(weight.kind)
            return "" if small.format_for(name, kind) != large.format_for(name, kind) else None

        return parts_of(self.planner, left_open)

    def harms(self, groups: Sequence[MixedPart], large: Recipe) -> Harms:
        """KL of every group in the smaller format, all else in the larger one."""
        self.model.compress(Selection())
        self.model.store_rows("fp16")
        truth = list(self.model.read(self.tokens[:BRIEF]))
        self.model.compress(large.compression)
        self.model.store_rows(large.embedding.rows)
        rest = self.compare(truth).mean("kl")
        costs = []
        for index, group in enumerate(groups):
            self.progress(f"part {index + 1} of a mix", index, len(groups))
            names = dict.fromkeys(group.patterns, SMALL)
            mixed = large.compression.model_copy(update={"names": large.compression.names | names})
            self.model.compress(mixed)
            costs.append(max(0.0, self.compare(truth).mean("kl") - rest))
        return Harms(rest=rest, groups=tuple(costs))

    def kept(self, kind: type[Kept], candidate: Recipe, make: Callable[[], Kept]) -> Kept:
        """A figure of a candidate, from the store where it is there already."""
        known = self.stored(kind, candidate)
        if known is not None:
            return known
        made = make()
        content = made.model_dump(mode="json")
        store.keep(self.key(kind, candidate), lambda folder: write_json(folder / FILE, content))
        return made

    def known(self, candidate: Recipe) -> Judgement | None:
        """What an earlier port or a plan learnt of a candidate; reads no weight."""
        return self.stored(Judgement, candidate)

    def stored(self, kind: type[Kept], candidate: Recipe) -> Kept | None:
        """A figure of a candidate, if the store has it."""
        with store.opened(self.key(kind, candidate)) as folder, suppress(CetaneError):
            return None if folder is None else validated(kind, read_json(folder / FILE), FILE)
        return None

    def key(self, kind: type[Data], candidate: Recipe) -> str:
        """A hash of everything that a figure depends on, limits and other data included."""
        recipe = candidate.model_dump(mode="json", include=DECIDING)
        recipe["cache"] = plain(candidate, WINDOW).cache.model_dump(mode="json")
        return task_key(kind.__name__, self.checkpoint.content, recipe, self.tokens, producers())


def known_to_hold(checkpoint: Checkpoint, recipe: Recipe, formats: Sequence[str]) -> set[str]:
    """Formats, as the recipe's default, that hold its promise: fp16, and those that were judged on
    this model in an earlier port. Reads no weight and judges nothing."""
    unfitted = override(recipe, {f"compression.{key}": value for key, value in UNFITTED.items()})
    bench, known = Bench(checkpoint, unfitted, silent), {NEAREST}
    for name, rows in product(formats, bench.rows()):
        judgement = bench.known(override(unfitted, {KEY: name, ROWS: rows}))
        if judgement is not None and judgement.passed:
            known.add(name)
    return known
