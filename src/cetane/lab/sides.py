"""The two sides of a running experiment, and the findings of a measure."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import quantiles
from typing import Any, Literal

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.errors import CetaneError
from cetane.files import Progress, is_claimed
from cetane.hardware.chips import Chip, find_chip
from cetane.lab.experiment import ARMS, Arm, ArmName, Experiment
from cetane.lab.journal import Figure
from cetane.lab.metrics import METRICS
from cetane.lab.workload import OpenWorkload, Setting
from cetane.pipeline.assembly import build_key
from cetane.pipeline.build import build
from cetane.planner import Planner, as_recipe_asks
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe

WAIT = 0.5
"""Seconds between two looks whether another process has built a bundle."""
WARM = 4
"""The uncounted first steps of a timing."""


@dataclass
class Findings:
    """A measure's figures, texts and curves of one side."""

    figures: dict[str, Figure] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def figure(
    name: str,
    value: float | None,
    kind: Literal["measured", "predicted"] = "measured",
    low: float | None = None,
    high: float | None = None,
    n: int = 1,
    note: str = "",
) -> Figure:
    """A figure in its metric's unit."""
    return Figure(
        value=value, low=low, high=high, unit=METRICS[name].unit, kind=kind, n=n, note=note
    )


def spread(name: str, values: list[float], note: str = "") -> Figure:
    """The median and the quartiles of several measurements."""
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return figure(name, middle, low=low, high=high, n=len(values), note=note)


class Side:
    """One arm: its recipe, its bundle (made on first use) and its engine."""

    def __init__(self, name: ArmName, arm: Arm, workload: OpenWorkload, progress: Progress) -> None:
        self.name, self.arm, self.workload, self.progress = name, arm, workload, progress
        self.recipe = self.narrowed(with_context(arm.recipe_here(), workload.spec.context))
        check_room(name, self.recipe, workload.spec.new_tokens)
        self.key = build_key(self.checkpoint, self.recipe)
        self.made: Bundle | None = None

    @cached_property
    def checkpoint(self) -> Checkpoint:
        return as_recipe_asks(self.workload.checkpoint, self.recipe)

    @property
    def bundle(self) -> Bundle:
        """The bundle, built or verified. Its name has a hash of what it is built from, so that
        another run finds it, and waits while it is built."""
        if self.made is None:
            folder = self.workload.setting.folder / "bundles"
            folder.mkdir(parents=True, exist_ok=True)
            target = folder / f"{self.recipe.name}-{self.key[:16]}"
            while is_claimed(target):  # an arm of another experiment, which another process runs
                self.progress(f"waiting for {target.name}", 0, 1)
                time.sleep(WAIT)
            self.made = build(self.checkpoint, self.recipe, target, self.progress)
        return self.made

    @cached_property
    def engine(self) -> Engine:
        """The engine that a user of this machine gets: Core ML's on a Mac."""
        return open_engine(self.bundle)

    @cached_property
    def chip(self) -> Chip:
        return find_chip(self.workload.spec.chip)

    @cached_property
    def real(self) -> Planner:
        """The plan of the model that the workload represents.

        A subset of the vocabulary comes from the model that runs here.
        """
        recipe = self.arm.recipe_there()
        if self.workload.spec.stands_for is not None:
            return Planner(self.workload.real, recipe)
        recipe = self.narrowed(recipe)
        return Planner(as_recipe_asks(self.workload.checkpoint, recipe), recipe)

    def narrowed(self, recipe: Recipe) -> Recipe:
        """The recipe with a subset of the vocabulary in its head, if the arm has one."""
        if self.arm.subset is None:
            return recipe
        from cetane.pipeline.vocabulary import covered_text, make_subset, ranked

        checkpoint = self.workload.checkpoint  # `self.checkpoint` is of the narrowed recipe
        tokenizer: Any = checkpoint.tokenizer
        vocab = checkpoint.config["vocab_size"]
        texts = [covered_text(tokenizer, self.workload.setting.text(self.workload.spec))]
        order = ranked(texts, vocab, tokenizer.necessary())
        subset = make_subset(order, self.arm.subset, tokenizer, texts, [])
        return override(recipe, {"head.subset": subset})


def with_context(recipe: Recipe, context: int | None) -> Recipe:
    """The recipe with another context; None for its own."""
    return recipe if context is None else override(recipe, {"cache.context": context})


def check_room(name: ArmName, recipe: Recipe, answer: int) -> None:
    """Raise CetaneError unless a prompt fits the context, before an answer of so many tokens with
    the steps that no measure counts, or with a last draft."""
    room = recipe.cache.context - answer - max(WARM, recipe.tokens.verify or 0)
    if room < 1:
        raise CetaneError(
            f"{name}: a context of {recipe.cache.context} has no room for a prompt before an "
            f"answer of {answer} tokens",
            "give the workload fewer new_tokens, or a larger context",
        )


class Sides:
    """Both sides on one workload."""

    def __init__(self, experiment: Experiment, setting: Setting, progress: Progress) -> None:
        assert experiment.workload is not None
        spec = experiment.workload
        workload = OpenWorkload(setting, spec, setting.checkpoint(spec))
        self.workload, self.progress = workload, progress
        self.by_arm: Mapping[ArmName, Side] = {
            name: Side(name, experiment.arm(name), workload, progress) for name in ARMS
        }

    @property
    def baseline(self) -> Side:
        return self.by_arm["baseline"]

    @property
    def candidate(self) -> Side:
        return self.by_arm["candidate"]


Measure = Callable[[Sides], Mapping[ArmName, Findings]]
MEASURES: dict[str, Measure] = {}
"""All measures, by the name in `METRICS`."""


def measure_of_both(name: str) -> Callable[[Measure], Measure]:
    """A decorator: enter a measure of both sides."""

    def register(function: Measure) -> Measure:
        MEASURES[name] = function
        return function

    return register


def measure_of_side(
    name: str,
) -> Callable[[Callable[[Side], Findings]], Callable[[Side], Findings]]:
    """A decorator: enter a measure of one side, which is called for both."""

    def register(function: Callable[[Side], Findings]) -> Callable[[Side], Findings]:
        MEASURES[name] = lambda sides: {arm: function(sides.by_arm[arm]) for arm in ARMS}
        return function

    return register
