"""Experiments as data: a hypothesis, the two recipes that it compares, and its metrics."""

import datetime
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PrivateAttr, field_validator, model_validator

from cetane.errors import CetaneError
from cetane.files import LARGEST_TEXT, json_sha256, sha256
from cetane.hardware.chips import find_chip
from cetane.lab.metrics import METRICS
from cetane.schema.changes import override
from cetane.schema.recipe import Recipe, load_recipe
from cetane.validation import Data, Finite, guess, validated

Status = Literal["Planned", "Prototype", "Measured", "Shipping", "Shelved", "Rejected"]
"""The legend of the published logs."""
STATUS_WORDS: tuple[Status, ...] = get_args(Status)
ArmName = Literal["baseline", "candidate"]
ARMS: tuple[ArmName, ...] = ("baseline", "candidate")
InputName = Literal["model", "text"]
"""The files that a workload names, and does not hold."""
BURIED: tuple[Status, ...] = ("Shelved", "Rejected")
"""The statuses that need an obituary, so that the idea is not built again."""
ID = r"^[a-z0-9][a-z0-9-]*$"
"""The pattern of an experiment's id."""
WHOSE = {"ratio": " to the baseline's", "baseline": " of the baseline"}
"""The words after a limited metric, by arm; the candidate's has none."""


def known_metric(name: str) -> str:
    """The name, if it is a metric. Raises ValueError with the nearest names."""
    if name not in METRICS:
        raise ValueError(f"no metric {name!r}; {guess(name, METRICS)}known: {', '.join(METRICS)}")
    return name


class Limit(Data):
    """Bounds on a metric: of the candidate, of the baseline, or of their ratio."""

    metric: str
    of: Literal["candidate", "baseline", "ratio"] = "candidate"
    least: Finite | None = None
    most: Finite | None = None

    @field_validator("metric")
    @classmethod
    def known(cls, metric: str) -> str:
        return known_metric(metric)

    @model_validator(mode="after")
    def bounded(self) -> "Limit":
        if self.least is None and self.most is None:
            raise ValueError(f"{self.metric}: needs 'least' or 'most'")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"{self.metric}: least {self.least:g} is more than most {self.most:g}")
        return self

    def holds(self, value: float) -> bool:
        """Whether a value lies within the bounds."""
        return within(value, self.least, self.most)

    def __str__(self) -> str:
        return bounds(self.metric, self.of, self.least, self.most)


def within(value: float, least: float | None, most: float | None) -> bool:
    """Whether a value lies within bounds. NaN and infinity do not."""
    above, below = least is None or value >= least, most is None or value <= most
    return math.isfinite(value) and above and below


def bounds(metric: str, of: str, least: float | None, most: float | None) -> str:
    """A metric and its bounds, in words."""
    limits = (("at least", least), ("at most", most))
    words = [f"{word} {bound:g}" for word, bound in limits if bound is not None]
    return f"{metric}{WHOSE.get(of, '')} {' and '.join(words)}"


Keys = Literal["newest", "quest", "quest-stale", "triforce"]


class SparseKeys(Data):
    """The keys that a decoded token reads, where it does not read all (`lab/sparse.py`)."""

    keys: Keys
    budget: int = Field(ge=64)
    """The number of keys."""


class NamesFile(Data):
    """A part of an experiment that may name a file, by a path from the experiment's folder."""

    _folder: Path = PrivateAttr(default=Path())

    def beside(self, experiment: Path) -> None:
        """Look for the file in the folder of the experiment at this path."""
        self._folder = experiment.absolute().parent  # a worker may run in another folder


class Arm(NamesFile):
    """One side: a recipe, and the fields that differ from it."""

    recipe: str
    """A recipe that comes with cetane, by its name, or the path of a .toml file."""
    changes: dict[str, Any] = Field(default_factory=dict)
    """Fields that replace the recipe's, by table."""
    scaled: dict[str, Any] = Field(default_factory=dict)
    """Further changes that fit the recipe to the small model that runs here. Speed is predicted
    without them, for the model that the workload represents."""
    drafter: str = ""
    """The drafter, as in `cetane run --speculative`; empty for none."""
    subset: int | None = Field(default=None, ge=1)
    """The number of tokens with rows in the head: those that the model uses most. None for all."""
    sparse: SparseKeys | None = Field(default=None, exclude_if=lambda chosen: chosen is None)
    """The keys that its attention reads in the reference; None for all."""
    activations: Literal["", "naive", "real", "real-smooth"] = ""
    """The calibration of 8-bit activations; empty to leave activations unquantised."""

    def recipe_here(self) -> Recipe:
        """The recipe of the bundle that is built."""
        return recipe_with(self.source, self.changes, self.scaled)

    def recipe_there(self) -> Recipe:
        """The recipe of the model whose speed is predicted."""
        return recipe_with(self.source, self.changes)

    @property
    def source(self) -> str:
        """The recipe as `load_recipe` takes it."""
        return str(self._folder / self.recipe) if self.recipe.endswith(".toml") else self.recipe


def recipe_with(source: str, *changes: dict[str, Any]) -> Recipe:
    """A recipe with some fields replaced. A CetaneError names an unknown field."""
    recipe = load_recipe(source)
    for tables in changes:
        recipe = override(recipe, dict(fields(tables)))
    return recipe


def fields(tables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Changes by dotted key, one for each field of a table."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{json.dumps(name)}", field) for name, field in value.items())
        else:
            yield key, value


class Workload(NamesFile):
    """The model, text and prompts of both arms."""

    model: str = Field(pattern=ID)
    """One of `lab/workload.py`'s `MODELS`, or a name whose path every run gets."""
    text: str = "stdlib"
    """`stdlib`, the documentation of Python's standard library, or the path of a file."""
    tokens: int = Field(default=512, ge=2)
    """Tokens of the text."""
    prompts: str = "smoke"
    """A list of `data/prompts`, or a category of the speculative suite."""
    new_tokens: int = Field(default=32, ge=2)
    """Tokens of an answer."""
    rounds: int = Field(default=5, ge=2)
    """Rounds of a timing."""
    context: int | None = Field(default=None, ge=32)
    """The context of both arms here; None for the recipes' own."""
    stands_for: Literal["zaya1-8b", "gemma4-e2b"] | None = None
    """The model that it represents, whose speed is predicted; None for `model` itself."""
    chip: str = "m4-max"
    """Written out: what a recorded experiment means must not change with the default."""

    @property
    def text_file(self) -> Path | None:
        """The file of the text; None for the documentation of Python."""
        return None if self.text == "stdlib" else self._folder / self.text

    @model_validator(mode="after")
    def possible(self) -> "Workload":
        """Refuse an unknown chip."""
        try:
            find_chip(self.chip)
        except CetaneError as error:
            raise ValueError(str(error)) from error
        return self


class ReportedFigure(Data):
    """A figure of the original."""

    what: str
    baseline: str = ""
    candidate: str
    source: str


class Experiment(Data):
    """The content of a file in `experiments/`."""

    id: str = Field(pattern=ID)
    title: str = Field(min_length=1)
    group: str = "Experiments"
    status: Status
    """The status here, until there is a verdict."""
    original: str = ""
    """The original's own word for its status, if that is not `status`."""
    date: datetime.date
    """The day of the original."""
    hypothesis: str = Field(min_length=1)
    expects: tuple[Limit, ...] = ()
    """The hypothesis in numbers. A bound that does not hold is a surprise."""
    workload: Workload | None = None
    baseline: Arm | None = None
    candidate: Arm | None = None
    metrics: tuple[str, ...] = ()
    gates: tuple[Limit, ...] = ()
    reported: tuple[ReportedFigure, ...] = ()
    differs: str = ""
    """The reason why cetane's figures differ from the original's."""
    unjudged: str = ""
    """The results that need an ANE, and the predicted figures in their place."""
    lesson: str = ""
    next: str = ""
    obituary: str = ""
    design: str = ""
    """The design of a Planned experiment."""
    references: tuple[str, ...] = ()

    @field_validator("metrics")
    @classmethod
    def known(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known_metric(metric) for metric in metrics)

    @model_validator(mode="after")
    def complete(self) -> "Experiment":
        """Refuse an experiment that lacks what its status needs, and limits of no metric of it."""
        if self.status in BURIED and not self.obituary:
            raise ValueError(f"a {self.status} experiment needs its obituary")
        if self.status == "Planned":
            if not self.design:
                raise ValueError("a Planned experiment needs its design")
            return self
        for name in ("workload", "baseline", "candidate", "metrics"):
            if not getattr(self, name):
                raise ValueError(f"{name} is missing, and the experiment is not Planned")
        for limit in (*self.expects, *self.gates):
            if limit.metric not in self.metrics:
                raise ValueError(f"{limit.metric} has a limit, but is not among the metrics")
        return self

    @property
    def originally(self) -> str:
        """The original's status, in its own word."""
        return self.original or self.status

    @property
    def runnable(self) -> bool:
        return self.status != "Planned"

    def arm(self, name: ArmName) -> Arm:
        """One side of a runnable experiment."""
        arm = self.baseline if name == "baseline" else self.candidate
        assert arm is not None
        return arm

    @property
    def sha256(self) -> str:
        """sha256 of the fields that decide a run's outcome, so without prose."""
        decisive = {"workload", "baseline", "candidate", "metrics", "gates", "expects"}
        return json_sha256(self.model_dump(mode="json", include=decisive))

    @property
    def recipes_sha256(self) -> dict[ArmName, str]:
        """The hashes of both arms' recipes; empty if one cannot be read, which a run reports."""
        try:
            return {name: recipe_sha256(self.arm(name).recipe_here()) for name in ARMS}
        except CetaneError:
            return {}

    @property
    def inputs_sha256(self) -> dict[InputName, str]:
        """The hash of the text, if it is a file that can be read. The user may give the model with
        each run, so that only `Setting.inputs` knows it."""
        if self.workload is not None and (file := self.workload.text_file) is not None:
            with suppress(CetaneError):
                return {"text": sha256(file, LARGEST_TEXT)}
        return {}


def recipe_sha256(recipe: Recipe) -> str:
    return json_sha256(recipe.model_dump(mode="json"))


def parse_experiment(content: dict[str, Any], where: str) -> Experiment:
    """Validate an experiment. A CetaneError names the key and, if unknown, the alternatives."""
    return validated(Experiment, content, where)
