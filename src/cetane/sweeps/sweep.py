"""A sweep: candidates judged one after another; a folder keeps the results."""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from cetane.checkpoint import Checkpoint
from cetane.compress import Format, Fp16, Selection, SensitivityFile
from cetane.compress.sensitivity import SENSITIVITY, stored_key
from cetane.errors import CetaneError
from cetane.files import Progress, disk_errors, replacing, sha256
from cetane.fitting.fit import fit
from cetane.gates.residency.target import Target
from cetane.hardware.chips import find_chip
from cetane.perf.predict import Predictor
from cetane.pipeline.stored_bundles import location
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.manifest import producers
from cetane.schema.recipe import RECIPE, Recipe, parse_recipe, recipe_files
from cetane.sweeps import mixed, moments, smoke
from cetane.sweeps.basis import Basis
from cetane.sweeps.candidates import Candidate, candidate_of
from cetane.sweeps.grid import parse_way
from cetane.sweeps.on_chip import predict
from cetane.sweeps.passage import Passage
from cetane.sweeps.points import (
    JudgedText,
    KeyedLedger,
    LayerScore,
    Point,
    Predicted,
    SweptModel,
    key_of,
)
from cetane.sweeps.sizes import Sizes
from cetane.tasks.task import code_version

POINTS, SCORES = "sweep.jsonl", "layers.jsonl"


@dataclass
class Sweep:
    """The points of one model, recipe, text and target; `folder` keeps them between runs."""

    checkpoint: Checkpoint
    recipe: Recipe
    passage: Passage
    target: Target
    folder: Path
    progress: Progress
    own: Basis = field(init=False)
    """The basis of candidates whose channels are turned, or not, as the recipe says."""
    refused: dict[str, str] = field(default_factory=dict)
    """The reasons why candidates could not be judged, by name."""

    def __post_init__(self) -> None:
        self.predictor = Predictor(find_chip(self.target.chip))  # refuses a chip before any work
        self.own = Basis(self.checkpoint, self.recipe, self.progress)
        self.sizes = Sizes(self.planner)
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.points = KeyedLedger(self.folder / POINTS, Point)
        self.scores = KeyedLedger(self.folder / SCORES, LayerScore)

    @property
    def planner(self) -> Planner:
        return self.own.planner

    @cached_property
    def rotated(self) -> Basis:
        """The basis of candidates that turn channels where the recipe does not."""
        recipe = override(self.recipe, {"compression.rotate": True})
        return Basis(self.checkpoint, recipe, self.progress)

    def basis(self, selection: Selection) -> Basis:
        """The basis of a selection."""
        own = selection.rotate == self.recipe.compression.rotate
        return self.own if own else self.rotated

    def loaded(self, selection: Selection) -> Basis:
        """The basis of a selection, about to compute: the other one's weights leave the memory."""
        basis = self.basis(selection)
        self.release(basis)
        return basis

    def release(self, but: Basis | None = None) -> None:
        """Give the memory of all weights back, or of all `but` those of one basis."""
        for basis in (self.own, vars(self).get("rotated")):
            if basis is not None and basis is not but:
                basis.release()

    @cached_property
    def sensitivities(self) -> SensitivityFile:
        """The file of sensitivities: the folder's, or made now."""
        path = self.folder / SENSITIVITY
        if not self.has_sensitivities:
            self.progress("sensitivities", 0, 1)
            self.release(self.own)
            judge = self.own.judge
            judge.compress(Selection())
            moments_of_text = moments.measure(judge, self.passage.calibration)
            with disk_errors(path), replacing(path) as temporary:
                moments_of_text.save(temporary, self.sensitivity_key)
        made = SensitivityFile(file=SENSITIVITY, sha256=sha256(path))
        made.find_at(path)
        return made

    @property
    def has_sensitivities(self) -> bool:
        """Whether the folder has the file of this model, recipe and text."""
        return stored_key(self.folder / SENSITIVITY) == self.sensitivity_key

    @property
    def sensitivity_key(self) -> str:
        """A hash of what sensitivities depend on, such as the recipe's basis and its windows."""
        basis = Selection(rotate=self.recipe.compression.rotate)
        return self.key(basis, self.passage.calibration)

    def way(self, name: str) -> Point | None:
        """The point of one way, by its name; None if it is refused."""
        if name in self.refused:
            return None
        try:
            return self.point(self.candidate(name))
        except CetaneError as error:
            if isinstance(parse_way(name).form, Fp16):  # then the model itself is at fault
                raise
            self.refused[name] = error.message
            return None

    def candidate(self, name: str) -> Candidate:
        """The candidate of a way, by its name. CetaneError for one that the model refuses."""
        way = parse_way(name)
        return candidate_of(way, self.planner, self.sensitivities if way.form.weighted else None)

    def knows_way(self, name: str) -> bool:
        """Whether a way was judged, as `knows` tells of a candidate. This measures nothing."""
        if parse_way(name).form.weighted and not self.has_sensitivities:
            return False
        with suppress(CetaneError):
            return self.knows(self.candidate(name))
        return False

    def mix(self, candidate: Candidate) -> Point | None:
        """The point of a mix; None if it is refused."""
        if candidate.name in self.refused:
            return None
        try:
            return self.point(candidate)
        except CetaneError as error:
            self.refused[candidate.name] = error.message
            return None

    def mixes(self, sizes: Sequence[int]) -> list[Candidate]:
        """Mixed formats for these sizes: bytes of the weights that formats are for."""
        known = []
        parts = mixed.parts_of(self.planner)
        taken = {weight.name for part in parts for weight in part.weights}
        others = sum(2 * w.elements for w in self.sizes.weights if w.name not in taken)
        options = mixed.harms(parts, self.harm, self.mixed_base, self.progress)
        for size in dict.fromkeys(sizes):
            mix = mixed.mix(parts, options, size - others, self.mixed_base)
            if mix is None:
                whole = (size + self.sizes.beside) / 1e6
                self.refused[f"mixed, {whole:.1f} MB"] = "the smallest formats do not fit"
            else:
                known.append(mix)
        return known

    @property
    def mixed_base(self) -> Selection:
        """The sensitivities and the basis, which all mixes share."""
        rotate = self.recipe.compression.rotate
        return Selection(sensitivity=self.sensitivities, rotate=rotate)

    def harm(self, part: mixed.LayerPart, form: Format, selection: Selection) -> float:
        """The KL of one part in a format, measured now or in an earlier sweep."""
        tokens = self.passage.harm
        key = self.key(selection, tokens)
        score = self.scores.get(key)
        if score is None:
            basis = self.loaded(selection)
            truth = basis.truth(tokens)
            basis.judge.compress(selection)
            kl = basis.judge.compare(truth).kl
            score = LayerScore(
                key=key, layer=part.layer, kind=part.weight_kind, format=form.name, kl=kl
            )
            self.scores.append(score)
        return score.kl

    def knows(self, candidate: Candidate) -> bool:
        """Whether a candidate was judged, with predictions for this sweep's target."""
        known = self.points.get(self.key(candidate.selection, self.passage.judged))
        return known is not None and known.predicted.target == self.target

    def knows_harm(self, selection: Selection) -> bool:
        """Whether the harm of a selection was measured."""
        key = self.key(selection, self.passage.harm)
        return self.scores.get(key) is not None

    def key(self, selection: Selection, tokens: Sequence[int]) -> str:
        """A hash of everything that a figure depends on: the code and its prompts, too."""
        base = self.recipe.model_dump(mode="json", exclude={"name", "description", "compression"})
        return key_of(
            self.checkpoint.content,
            base,
            selection.model_dump(mode="json"),
            tokens,
            producers(),
            code_version(),
        )

    def point(self, candidate: Candidate) -> Point:
        """A candidate judged now or in an earlier sweep, with predictions for the target."""
        key = self.key(candidate.selection, self.passage.judged)
        known = self.points.get(key)
        if known is not None and known.predicted.target == self.target:
            return known
        started = time.perf_counter()
        basis, recipe = self.basis(candidate.selection), self.recipe_of(candidate.selection)
        planner = Planner(basis.checkpoint, recipe, basis.planner)
        predicted = predict(planner, self.predictor, self.target)
        if known is None:
            point = self.measure(candidate, key, planner, predicted, started)
        else:
            point = known.model_copy(update={"predicted": predicted})
        self.points.append(point)
        return point

    def measure(
        self, candidate: Candidate, key: str, planner: Planner, predicted: Predicted, started: float
    ) -> Point:
        """Judge a candidate that was never judged. `started` is `time.perf_counter()` when its work
        began."""
        selection = self.with_constants(candidate.selection, planner)
        basis = self.loaded(selection)
        truth, answers = basis.truth(self.passage.judged), basis.answers
        basis.judge.compress(selection)
        judged = basis.judge.compare(truth)
        answered = smoke.ask(basis.judge)
        return Point(
            key=key,
            name=candidate.name,
            method=candidate.method,
            bits=candidate.bits,
            group=candidate.group,
            compression=candidate.selection,
            weight_bytes=planner.plan().weight_bytes,
            bits_per_weight=8 * self.sizes.of(candidate.selection) / self.sizes.elements,
            perplexity=judged.perplexity,
            perplexity_ratio=judged.perplexity / judged.reference,
            kl=judged.kl,
            top1=judged.top1,
            cosines=judged.cosines,
            smoke=smoke.compare(self.checkpoint.tokenizer, answered, answers),
            predicted=predicted,
            seconds=time.perf_counter() - started,
            model=SweptModel(source=location(self.checkpoint.source),
                        fingerprint=self.checkpoint.fingerprint,
                        content=self.checkpoint.content),
            text=JudgedText(name=self.passage.name, sha256=self.passage.sha256,
                      tokens=sum(len(window.tokens) - 1 for window in truth)),
            producer=producers(),
        )  # fmt: skip

    def with_constants(self, selection: Selection, planner: Planner) -> Selection:
        """The selection with the constants that its method fits to the model, made once: a port of
        the same recipe finds them too."""
        if selection.method == "plain":
            return selection
        self.release()  # fitting loads the model once more, with room for gradients
        fitted = fit(self.basis(selection).checkpoint, planner, self.progress)
        return selection.model_copy(update={"fitted": fitted})

    def recipe_of(self, selection: Selection) -> Recipe:
        """The sweep's recipe with another compression."""
        content = self.recipe.model_dump() | {"compression": selection.model_dump()}
        made = parse_recipe(content, self.recipe.name)
        # a selection that was read from a file does not know where texts lie
        made.compression.find_as(*selection.files, *self.recipe.compression.files)
        if made.compression.sensitivity is not None:
            made.compression.sensitivity.find_beside(self.folder / SENSITIVITY)
        return made


def write_recipe(sweep: Sweep, point: Point) -> Path:
    """The sweep's recipe with a point's compression, as TOML that `cetane port -r` takes. Its files
    lie beside it."""
    made = sweep.recipe_of(point.compression)
    description = (
        f"{point.bits_per_weight:.2f} bits a weight; perplexity {point.perplexity:.2f}, "
        f"{point.perplexity_ratio:.3f} times that of fp16, on {point.text.tokens} tokens of "
        f"{point.text.name}"
    )
    changes: dict[str, Any] = {"name": point.name, "description": description}
    if made.compression.text is not None:
        changes["compression.text"] = made.compression.text.copy_to(sweep.folder).model_dump()
    for name, write in recipe_files(override(made, changes)).items():
        with disk_errors(sweep.folder), replacing(sweep.folder / name) as temporary:
            write(temporary)
    return sweep.folder / RECIPE
