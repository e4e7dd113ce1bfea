"""Rules: knowledge about patterns of ops, as data with sources, each with a predicate.

The data of a group of rules is in `rules/GROUP.toml`, its predicates in `rules/GROUP.py`.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from cetane.errors import CetaneError
from cetane.files import shipped_text
from cetane.validation import Data

if TYPE_CHECKING:
    from cetane.gates.residency.graph import Graph
    from cetane.gates.residency.target import Target
    from cetane.mil.program import Op

GROUPS = ("shapes", "selection", "operations", "weights", "states", "numerics", "programs")

Placement = Literal["ANE", "CPU", "fails", "wrong", "unknown"]
"""The place of an op:

- `ANE`: on the ANE;
- `CPU`: on any other unit;
- `fails`: nowhere, since the program does not compile, load or run;
- `wrong`: on the ANE, with wrong numbers;
- `unknown`: there is no report.
"""
Severity = Literal["fatal", "silent", "risk", "perf", "info"]
"""What a rule's pattern does:

- `fatal`: the program does not run;
- `silent`: it runs elsewhere or gives wrong numbers, and nothing says so;
- `risk`: the evidence is thin or divided;
- `perf`: it is slower than necessary;
- `info`: good to know.
"""
Confidence = Literal["high", "medium", "low"]
Scope = Literal["op", "function", "places", "bundle"]
"""What a predicate gets: one op (`op`), a function (`function`), the placements of a function's ops
(`places`), or all functions of all programs (`bundle`)."""

GOOD_TO_BAD: tuple[Placement, ...] = ("ANE", "unknown", "CPU", "wrong", "fails")
"""Placements from good to bad. Of several rules about one op, the one with the worst holds."""


class Citation(Data):
    """One piece of evidence."""

    claim: str
    where: str
    """Repository and file, issue, or paper."""
    date: str
    """The date of publication or measurement: "2026-04", or only "2026"."""
    contradicts: bool = False
    """Whether it contradicts the rule, whose confidence then cannot be high."""


class Known(Data):
    """The common fields of rules and evidence."""

    id: str
    placement: Placement | None = None
    """The placement of its ops; None if it decides none."""
    confidence: Confidence
    sources: tuple[Citation, ...] = Field(min_length=1)


class Evidence(Known):
    """Kinds of op with a reported place, such as the ANE."""

    kinds: tuple[str, ...] = Field(min_length=1)


class Rule(Known):
    """A pattern that decides where ops run, or how fast."""

    title: str
    severity: Severity
    message: str
    fix: str
    chips: tuple[str, ...] = ("*",)
    """Patterns of chip ids."""
    min_os: float = 0
    before_os: float | None = None
    """The first system without the pattern's fault; None if none is known."""
    framework: Literal["Core ML"] = "Core ML"
    changes: dict[str, str | int | bool] = Field(default_factory=dict)
    """The values of a recipe that mend it, by dotted key; `more` chunks are twice as many."""
    drags: bool = False
    """Whether unary and shape ops between the op and the edge of the graph leave with it."""
    group: str = ""

    def applies(self, target: Target) -> bool:
        """Whether the rule is about this chip and system."""
        mended = self.before_os is not None and target.os >= self.before_os
        systems = target.os >= self.min_os and not mended
        return systems and any(fnmatchcase(target.chip, chip) for chip in self.chips)


OpPredicate = Callable[["Op", "Graph"], str | None]
FunctionPredicate = Callable[["Graph"], str | None]
PlacesPredicate = Callable[["Graph", Mapping[int, Placement]], str | None]
BundlePredicate = Callable[[Sequence["Graph"]], str | None]
"""A predicate describes the pattern that it finds, in words that follow the rule's message; None if
there is none. A `PlacesPredicate` also gets where the other rules put each op, by its `id`. A
`BundlePredicate` gets the graphs of all functions."""

PREDICATES: dict[str, tuple[Scope, Callable[..., str | None]]] = {}
"""The scope and predicate of every rule, by its id."""


def on_op(id: str) -> Callable[[OpPredicate], OpPredicate]:
    """Register the predicate of a rule about single ops."""
    return _register("op", id)


def on_function(id: str) -> Callable[[FunctionPredicate], FunctionPredicate]:
    """Register the predicate of a rule about all ops of a function."""
    return _register("function", id)


def on_places(id: str) -> Callable[[PlacesPredicate], PlacesPredicate]:
    """Register the predicate of a rule about where a function's ops are placed."""
    return _register("places", id)


def on_bundle(id: str) -> Callable[[BundlePredicate], BundlePredicate]:
    """Register the predicate of a rule about all programs that are loaded together."""
    return _register("bundle", id)


def _register(scope: Scope, id: str) -> Callable[[Any], Any]:
    def register(predicate: Any) -> Any:
        PREDICATES[id] = scope, predicate
        return predicate

    return register


@cache
def load_rules() -> dict[str, Rule]:
    """All rules by id, with their predicates registered."""
    rules = {}
    for group in GROUPS:
        importlib.import_module(f"cetane.gates.residency.rules.{group}")
        for content in read_toml(f"rules/{group}.toml")["rule"]:
            rule = Rule(**content, group=group)
            rules[rule.id] = rule
    return rules


@cache
def load_evidence() -> dict[str, Evidence]:
    """All evidence, by its id."""
    items = (Evidence(**content) for content in read_toml("evidence.toml")["evidence"])
    return {evidence.id: evidence for evidence in items}


@cache
def seen() -> dict[str, Evidence]:
    """The evidence, by the kind of op that it is about."""
    return {kind: evidence for evidence in load_evidence().values() for kind in evidence.kinds}


def find(id: str) -> Rule | Evidence:
    """A rule or a piece of evidence. Raises CetaneError for an unknown id."""
    known: dict[str, Rule | Evidence] = {**load_rules(), **load_evidence()}
    if id not in known:
        raise CetaneError(f"no rule {id!r}", "cetane audit --rules lists them")
    return known[id]


@cache
def read_toml(name: str) -> dict[str, Any]:
    """A TOML file of this package."""
    return tomllib.loads(shipped_text(f"gates/residency/{name}"))
