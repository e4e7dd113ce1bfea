"""The matching of two functions: pairs of ops that compute the same value.

Data flow decides first: ops of the same kind with the same inputs are a pair. If several ops fit,
such as the query, key and value projections of one tensor, the names of weights and results decide,
then their order. If the functions differ, as in a fused norm, names and order lead to the next op
that both have. Casts between float types are ignored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from cetane.errors import CetaneError
from cetane.mil.dtypes import FLOATS
from cetane.mil.lineage import Lineage, plain
from cetane.mil.program import Body, MilFunction, NamedValue, Op

COMMUTATIVE = {"add", "mul", "maximum", "minimum", "equal", "not_equal", "logical_and",
               "logical_or", "logical_xor"}  # fmt: skip

OpForm = tuple[str, tuple[str, ...]]
"""The kind of an op, and the shapes of its results as text."""
Inputs = list[tuple[str, str | None]]
"""Parameters of an op, each with the name of a value; None if the value has no counterpart."""


@dataclass(frozen=True)
class Match:
    """An op of the second program and its counterpart in the first.

    `first` is None for a cast that only the second program has. `values` pairs the names of their
    results, first program first.
    """

    first: Op | None
    second: Op
    values: tuple[tuple[str, str], ...]
    rewired: bool
    """Whether the two ops have different inputs."""


@dataclass(frozen=True)
class Matching:
    """The matches, in the second program's order, and the ops of each without a counterpart."""

    matches: tuple[Match, ...]
    only_first: tuple[Op, ...]
    only_second: tuple[Op, ...]


def match(first: MilFunction, second: MilFunction) -> Matching:
    """Pair the ops of two functions. Raises CetaneError if they cannot take the same inputs."""
    _check_interfaces(first, second)
    matcher = _Matcher(Lineage(first), Lineage(second))
    matcher.same.update((name, name) for name in (*first.inputs, *first.states))
    matcher.block(first.body, second.body)
    return matcher.result()


@dataclass
class _Matcher:
    first: Lineage
    second: Lineage
    same: dict[str, str] = field(default_factory=dict)
    """Names in the first program, by names in the second."""
    pairs: dict[int, tuple[Op, Op]] = field(default_factory=dict)
    """The pairs, by the identity of the second program's op."""
    taken: set[int] = field(default_factory=set)
    """Identities of the first program's ops that have a pair."""
    ops: tuple[list[Op], list[Op]] = field(default_factory=lambda: ([], []))
    """All ops that run, of each program."""

    def block(self, first: Body, second: Body) -> None:
        """Match two bodies, and the bodies inside matched ops."""
        self.same.update(
            (b.name, a.name) for a, b in zip(first.inputs, second.inputs, strict=False)
        )
        ours, theirs = self.first.live(first), self.second.live(second)
        self.ops[0].extend(ours)
        self.ops[1].extend(theirs)
        self._follow(ours, theirs)
        while self._align(ours, theirs):
            self._follow(ours, theirs)
        for a, b in [self.pairs[id(op)] for op in theirs if id(op) in self.pairs]:
            for inner in zip(a.bodies, b.bodies, strict=False):
                self.block(*inner)

    def _follow(self, ours: list[Op], theirs: list[Op]) -> None:
        """Match forward from the ops that are matched already."""
        alike: dict[tuple[OpForm, tuple[str, ...]], list[Op]] = defaultdict(list)
        named: dict[str, Op] = {}
        for op in ours:
            if id(op) not in self.taken:
                alike[_form(op), _wiring(op, self._sources(op))].append(op)
                named[_name(op)] = op
        for op in theirs:
            if id(op) in self.pairs:
                continue
            images = self._images(op)
            if all(image for _, image in images):
                same = alike[_form(op), _wiring(op, images)]
                free = [a for a in same if id(a) not in self.taken]
                if free:
                    self._pair(max(free, key=lambda a: self._likeness(a, op)), op)
            elif not _name(op)[-1:].isdigit():  # a converter's counter proves nothing
                other = named.get(_name(op))
                if other is not None and self._may_be(other, op):
                    self._pair(other, op)

    def _align(self, ours: list[Op], theirs: list[Op]) -> bool:
        """Match the remaining ops by kind, shape and their order between matched ops."""
        marks = {id(op): key for key, pair in self.pairs.items() for op in pair}
        a_tokens: list[Hashable] = [marks.get(id(op), _form(op)) for op in ours]
        b_tokens: list[Hashable] = [marks.get(id(op), _form(op)) for op in theirs]
        before = len(self.pairs)
        aligned = SequenceMatcher(None, a_tokens, b_tokens, autojunk=False)
        for i, j, size in aligned.get_matching_blocks():
            for a, b in zip(ours[i : i + size], theirs[j : j + size], strict=True):
                if id(a) not in self.taken and id(b) not in self.pairs:
                    self._pair(a, b)
        return len(self.pairs) > before

    def _pair(self, a: Op, b: Op) -> None:
        self.pairs[id(b)] = a, b
        self.taken.add(id(a))
        self.same.update((v.name, u.name) for u, v in zip(a.outputs, b.outputs, strict=True))

    def _may_be(self, a: Op, b: Op) -> bool:
        """Whether two ops can be a pair, as far as their inputs are matched."""
        if _form(a) != _form(b) or id(a) in self.taken:
            return False
        images = dict(self._images(b))
        return all(images.get(p) in (None, source) for p, source in self._sources(a))

    def _likeness(self, a: Op, b: Op) -> tuple[bool, bool]:
        """A rank by names of two ops with the same inputs; the highest rank is the likeliest
        pair."""
        return self.first.weight(a) == self.second.weight(b), _name(a) == _name(b)

    def _sources(self, op: Op) -> Inputs:
        """The inputs of an op of the first program."""
        return [(p, self.first.source(name)) for p, name in self.first.inputs(op)]

    def _images(self, op: Op) -> Inputs:
        """The inputs of an op of the second program, as values of the first; None if unmatched."""
        return [(p, self._image(name)) for p, name in self.second.inputs(op)]

    def _image(self, name: str) -> str | None:
        while name not in self.same and name in self.second.before:
            name = self.second.before[name]
        return self.first.source(self.same[name]) if name in self.same else None

    def result(self) -> Matching:
        matches, alone = [], []
        for b in self.ops[1]:
            if id(b) in self.pairs:
                a = self.pairs[id(b)][0]
                values = zip(a.outputs, b.outputs, strict=True)
                rewired = _wiring(a, self._sources(a)) != _wiring(b, self._images(b))
                matches.append(Match(a, b, tuple((u.name, v.name) for u, v in values), rewired))
            elif b.outputs and (source := self._image(b.outputs[0].name)):
                matches.append(Match(None, b, ((source, b.outputs[0].name),), False))
            else:
                alone.append(b)
        left = [
            a
            for a in self.ops[0]
            if id(a) not in self.taken and not any(v.name in self.first.before for v in a.outputs)
        ]
        return Matching(tuple(matches), tuple(left), tuple(alone))


def _wiring(op: Op, inputs: Inputs) -> tuple[str, ...]:
    """The inputs of an op as a key, which is equal for any order of a sum's terms."""
    if op.kind in COMMUTATIVE:
        return tuple(sorted(str(name) for _, name in inputs))
    return tuple(f"{parameter}={name}" for parameter, name in inputs)


def _form(op: Op) -> OpForm:
    """The kind of an op and the shapes of its results."""
    return op.kind, tuple(map(_shape, op.outputs))


def _shape(value: NamedValue) -> str:
    if value.type is None or value.type.any_shape:
        return ""
    return f"{'float' if value.type.dtype in FLOATS else value.type.dtype} {value.type.shape}"


def _name(op: Op) -> str:
    return plain(op.outputs[0].name if op.outputs else op.name)


def _check_interfaces(first: MilFunction, second: MilFunction) -> None:
    for what, ours, theirs in (
        ("input", first.inputs, second.inputs),
        ("state", first.states, second.states),
    ):
        for name in sorted(ours.keys() | theirs.keys()):
            a, b = ours.get(name), theirs.get(name)
            if a is None or b is None:
                where = "second" if a is None else "first"
                raise CetaneError(
                    f"only the {where} program has the {what} {name}, "
                    "so the two cannot take the same inputs"
                )
            floats = a.dtype in FLOATS and b.dtype in FLOATS
            shapes = (a.shape, a.enumerated) == (b.shape, b.enumerated)
            if not shapes or not (floats or a.dtype == b.dtype):
                raise CetaneError(f"{what} {name} is {a} in the first program, {b} in the second")
