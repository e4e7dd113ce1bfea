"""The results of a comparison of two programs, op by op: the gaps, their causes, and limits."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cetane.mil.gap import Gap

TOLERANCE = 1e-3
"""The largest relative error of one op that is no sign of a fault. Rounding weights or results to
fp16 gives less: at most 2^-11."""
DRIFT = 50
"""The largest total error to which correct ops may add up, in tolerances. Seven layers of
SmolLM2-135M in fp16 reach 22 on random inputs."""


@dataclass(frozen=True)
class InputRange:
    """An input tensor of an op, with the range of its finite values in the first program."""

    parameter: str
    name: str
    shape: tuple[int, ...]
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """A constant of an op that differs from its counterpart's."""

    parameter: str
    name: str
    relative: float
    """`Gap.relative`."""
    weight: bool
    text: str
    """The two values, if they are short."""


@dataclass(frozen=True)
class OpGap:
    """A result of an op that both programs have."""

    name: str
    counterpart: str
    """The value in the first program."""
    kind: str
    scope: str
    own: Gap
    total: Gap
    rewired: bool
    """Whether its inputs come from other ops than its counterpart's."""
    constants: tuple[Difference, ...]
    inputs: tuple[InputRange, ...]
    largest: float
    """Largest finite magnitude in the first program."""
    half: bool
    """Whether only the second program rounds it to fp16."""

    @property
    def causes(self) -> tuple[str, ...]:
        """The possible causes of its own error."""
        if self.own.relative == 0:
            return ()
        causes = [
            f"{'weights' if c.weight else 'parameter'}: {c.parameter} "
            + (c.text or f"off by {c.relative:.2g}")
            for c in self.constants
        ]
        if self.rewired:
            causes.append("graph: its inputs are made in another way")
        if self.half and self.own.overflowed:
            causes.append("fp16: overflow")
        elif self.half and self.own.vanished:
            causes.append(f"fp16: {self.own.vanished:.2g} of it becomes zero")
        elif self.half:
            causes.append("fp16: rounding")
        return tuple(causes)


@dataclass(frozen=True)
class Comparison:
    """Every compared result, in the second program's order, and the results left uncompared."""

    ops: tuple[OpGap, ...]
    outputs: dict[str, Gap]
    """The total error of each output, and of each state after the call."""
    own_outputs: dict[str, Gap]
    """Their own error: of the ops after the last compared one, which only the second program
    has."""
    only_first: tuple[str, ...]
    """Ops without a counterpart, "name (kind)"."""
    only_second: tuple[str, ...]
    missing: tuple[str, ...]
    """Outputs and states of the first program without a counterpart."""

    def first_own(self, tolerance: float) -> OpGap | None:
        """The first op whose own error exceeds the tolerance: the origin of an error."""
        return next((op for op in self.ops if op.own.relative > tolerance), None)

    def first_total(self, tolerance: float) -> OpGap | None:
        """The first op whose total error exceeds `DRIFT` tolerances, whatever its origin."""
        return next((op for op in self.ops if op.total.relative > DRIFT * tolerance), None)

    def parted(self, tolerance: float) -> bool:
        """Whether an op errs by itself, errors add up to `DRIFT`, or an output was not compared."""
        ops = self.first_own(tolerance) or self.first_total(tolerance)
        own = any(gap.relative > tolerance for gap in self.own_outputs.values())
        total = any(gap.relative > DRIFT * tolerance for gap in self.outputs.values())
        return ops is not None or own or total or bool(self.missing)


def worst(comparisons: Iterable[Comparison]) -> Comparison:
    """One comparison from several on different inputs: it has the worst gap of every result."""
    first, *others = comparisons
    ops = {op.name + op.counterpart: op for op in first.ops}
    outputs, own_outputs = dict(first.outputs), dict(first.own_outputs)
    for other in others:
        for op in other.ops:
            key = op.name + op.counterpart
            before = ops.get(key, op)
            larger = max(before, op, key=lambda gap: gap.own.relative)
            total = max(before.total, op.total, key=lambda gap: gap.relative)
            largest = max(before.largest, op.largest)
            ops[key] = replace(larger, total=total, largest=largest)
        for worst_yet, more in ((outputs, other.outputs), (own_outputs, other.own_outputs)):
            for name, one in more.items():
                worst_yet[name] = max(worst_yet.get(name, one), one, key=lambda g: g.relative)
    return replace(first, ops=tuple(ops.values()), outputs=outputs, own_outputs=own_outputs)
