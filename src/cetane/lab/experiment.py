"""Experiments: a hypothesis, the two recipes it compares, and what is measured, as data."""

import datetime
import hashlib
import json
import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from cetane.errors import CetaneError
from cetane.files import read_toml
from cetane.lab.metrics import METRICS
from cetane.schema.recipe import Recipe, load_recipe, override
from cetane.validation import Data, guess, validated

Status = Literal["Planned", "Prototype", "Measured", "Shipping", "Shelved", "Rejected"]
"""The legend of the published logs."""
STATUS_WORDS: tuple[Status, ...] = get_args(Status)
ArmName = Literal["baseline", "candidate"]
ARMS: tuple[ArmName, ...] = ("baseline", "candidate")
BURIED: tuple[Status, ...] = ("Shelved", "Rejected")
"""What needs an obituary, lest somebody builds it again."""
WHOSE = {"ratio": " to the baseline's", "baseline": " of the baseline"}
"""What a limit is about, in words; nothing is said of the candidate's."""
Number = Annotated[float, Field(allow_inf_nan=False)]


def known_metric(name: str) -> str:
    """The name, if there is such a metric; ValueError with the nearest ones."""
    if name not in METRICS:
        raise ValueError(f"no metric {name!r}; {guess(name, METRICS)}known: {', '.join(METRICS)}")
    return name


class Limit(Data):
    """A metric of the candidate, or its ratio to the baseline's, between two numbers."""

    metric: str
    of: Literal["candidate", "baseline", "ratio"] = "candidate"
    least: Number | None = None
    most: Number | None = None

    @field_validator("metric")
    @classmethod
    def known(cls, metric: str) -> str:
        return known_metric(metric)

    @model_validator(mode="after")
    def bounded(self) -> "Limit":
        if self.least is None and self.most is None:
            raise ValueError(f"{self.metric}: neither 'least' nor 'most'")
        if self.least is not None and self.most is not None and self.least > self.most:
            raise ValueError(f"{self.metric}: least {self.least:g} is more than most {self.most:g}")
        return self

    def holds(self, value: float) -> bool:
        """Whether a value lies within; what is no number does not."""
        low = -math.inf if self.least is None else self.least
        high = math.inf if self.most is None else self.most
        return low <= value <= high

    def __str__(self) -> str:
        bounds = [
            f"{word} {bound:g}"
            for word, bound in (("at least", self.least), ("at most", self.most))
            if bound is not None
        ]
        return f"{self.metric}{WHOSE.get(self.of, '')} {' and '.join(bounds)}"


class Arm(Data):
    """One side: a recipe, and the fields of it that are different."""

    recipe: str
    changes: dict[str, Any] = Field(default_factory=dict)
    """By table of the recipe; a field that is given replaces the recipe's."""
    scaled: dict[str, Any] = Field(default_factory=dict)
    """Further changes that fit the recipe to the small model that runs here; speed is predicted
    without them, for the model that the workload stands for."""
    drafter: str = ""
    """Who proposes tokens, as for `cetane run --speculative`; nobody, if it is empty."""
    subset: int | None = Field(default=None, ge=1)
    """Tokens that the head has rows for: what the model says most."""
    activations: Literal["", "naive", "real", "real-smooth"] = ""
    """How 8-bit activations are calibrated, if they are quantised."""

    def recipe_here(self) -> Recipe:
        """What is built."""
        return changed(self.recipe, self.changes, self.scaled)

    def recipe_there(self) -> Recipe:
        """What is predicted."""
        return changed(self.recipe, self.changes)


def changed(name: str, *changes: dict[str, Any]) -> Recipe:
    """A recipe with some fields replaced; CetaneError names one that it has not."""
    recipe = load_recipe(name)
    for tables in changes:
        recipe = override(recipe, dict(fields(tables)))
    return recipe


def fields(tables: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Changes by dotted key: those of a table's fields, and plain values."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{json.dumps(name)}", field) for name, field in value.items())
        else:
            yield key, value


class Workload(Data):
    """What both arms are given."""

    model: Literal["zaya-tiny", "smollm2", "gemma4-synthetic", "gemma3"]
    text: str = "stdlib"
    """Documentation of Python's standard library, or a file."""
    tokens: int = Field(default=512, ge=2)
    """Of the text."""
    prompts: str = "smoke"
    """A list of `data/prompts`, or a category of the speculative suite."""
    new_tokens: int = Field(default=32, ge=2)
    """Of an answer."""
    rounds: int = Field(default=5, ge=2)
    """Of a timing."""
    context: int | None = Field(default=None, ge=32)
    """Of both arms here, in place of their recipes'."""
    stands_for: Literal["zaya1-8b", "gemma4-e2b"] | None = None
    """The model that speed is predicted for; itself, when it is not said."""
    chip: str = "m4-max"


class Report(Data):
    """A figure as the original gives it."""

    what: str
    baseline: str = ""
    candidate: str
    source: str


class Experiment(Data):
    """One file of `experiments/`."""

    id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$")
    title: str = Field(min_length=1)
    group: str = "Experiments"
    status: Status
    date: datetime.date
    """Of the original."""
    hypothesis: str = Field(min_length=1)
    expects: tuple[Limit, ...] = ()
    """The hypothesis in numbers; what does not hold is a surprise."""
    workload: Workload | None = None
    baseline: Arm | None = None
    candidate: Arm | None = None
    metrics: tuple[str, ...] = ()
    gates: tuple[Limit, ...] = ()
    reported: tuple[Report, ...] = ()
    differs: str = ""
    """Why our figures are not the original's."""
    unjudged: str = ""
    """What needs an ANE, and which predicted figure stands for it."""
    lesson: str = ""
    next: str = ""
    obituary: str = ""
    design: str = ""
    """How a Planned one would be built."""
    references: tuple[str, ...] = ()

    @field_validator("metrics")
    @classmethod
    def known(cls, metrics: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(known_metric(metric) for metric in metrics)

    @model_validator(mode="after")
    def complete(self) -> "Experiment":
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
    def runnable(self) -> bool:
        return self.status != "Planned"

    def arm(self, name: ArmName) -> Arm:
        """One side of a runnable experiment."""
        arm = self.baseline if name == "baseline" else self.candidate
        assert arm is not None
        return arm

    @property
    def sha256(self) -> str:
        """Of what decides a run's outcome; prose does not."""
        decisive = {"workload", "baseline", "candidate", "metrics", "gates", "expects"}
        return sha256_of(self.model_dump(mode="json", include=decisive))


def sha256_of(content: Any) -> str:
    """sha256 of a JSON document."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def shipped() -> Path:
    """The experiments that come with cetane."""
    folder = Path(str(resources.files("cetane"))) / "experiments"
    return folder if folder.is_dir() else Path(__file__).parents[3] / "experiments"


def load_experiments(folder: Path) -> dict[str, Experiment]:
    """All experiments of a folder by id; CetaneError for one that is wrong, or a missing folder."""
    if not folder.is_dir():
        raise CetaneError(f"{folder}: no such folder", "--lab FOLDER names one with experiments")
    return {path.stem: load_experiment(path) for path in sorted(folder.glob("*.toml"))}


def find_experiment(folder: Path, name: str) -> Experiment:
    """One of a folder by id, with recipes that there are; CetaneError with the alternatives."""
    path = folder / f"{name}.toml"
    known = sorted(path.stem for path in folder.glob("*.toml"))
    if name not in known:
        raise CetaneError(
            f"no experiment {name!r} in {folder}; {guess(name, known)}known: {', '.join(known)}"
        )
    experiment = load_experiment(path)
    for arm in ARMS if experiment.runnable else ():
        try:
            experiment.arm(arm).recipe_here()
            experiment.arm(arm).recipe_there()
        except CetaneError as error:
            raise CetaneError(f"{path}: {arm}: {error.message}", error.hint) from error
    return experiment


def load_experiment(path: Path) -> Experiment:
    """An experiment from its file; its recipes are not looked up."""
    content = read_toml(path)
    experiment = parse_experiment({"id": path.stem} | content, str(path))
    if experiment.id != path.stem:
        raise CetaneError(f"{path}: id {experiment.id!r} is not the file's name")
    return experiment


def parse_experiment(content: dict[str, Any], where: str) -> Experiment:
    """Validate; a CetaneError names the key and, for an unknown one, the alternatives."""
    return validated(Experiment, content, where)
