"""The op from which infinity or NaN comes, in a port that gives one."""

from collections.abc import Callable
from math import isfinite
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from cetane.engine.backend import Arrays
from cetane.engine.engine import Engine
from cetane.engine.portable import ReferenceProgram
from cetane.mil.index import FunctionIndex
from cetane.mil.lineage import Lineage
from cetane.mil.program import MilFunction, Op, Precision, Program
from cetane.schema.plan import Plan
from cetane.validation import Data


class LostNumbers(Data):
    """The op that first gives infinity or NaN. Its inputs have none."""

    shard: str
    function: str
    op: str
    kind: str
    place: str
    """The parameter that it reads, or the last one before it, as far as the package tells."""
    inputs: float
    """The largest magnitude among its inputs, without those of constants."""

    @property
    def told(self) -> str:
        """The same as a sentence."""
        near = f" ({self.place})" if self.place else ""
        return (
            f"Infinity or NaN first comes from the {self.kind} {self.op}{near}, in {self.function} "
            f"of {self.shard}, whose inputs reach {self.inputs:.3g}."
        )


@runtime_checkable
class Loading(Protocol):
    """A backend of packages, which gives their programs before it compiles them."""

    dtype: type[np.floating[Any]]

    def load(self, shard: str) -> Program: ...


class Found(Exception):
    """Ends a search."""

    def __init__(self, lost: LostNumbers) -> None:
        self.lost = lost


class Seeker:
    """A backend that runs the programs of another one op by op, until one gives infinity or NaN."""

    name, by_rows = "seeker", False

    def __init__(self, loading: Loading, plan: Plan, precision: Precision) -> None:
        self.loading, self.plan, self.precision = loading, plan, precision
        self.dtype = loading.dtype

    def open(self, shard: str) -> "SeekingProgram":
        blocks = self.plan.by_name[shard].blocks
        return SeekingProgram(shard, blocks, self.loading.load(shard), self.precision)


class SeekingProgram(ReferenceProgram):
    """One shard of a seeker."""

    def __init__(
        self, shard: str, blocks: tuple[str, ...], program: Program, precision: Precision
    ) -> None:
        super().__init__(program, precision)
        self.shard, self.blocks = shard, blocks

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        tops = dict[str, float]()

        def note(name: str, value: Tensor) -> None:
            if value.is_floating_point() and value.numel():
                tops[name] = float(value.abs().max())  # NaN if any is

        outputs: Arrays = self.function(function)(inputs, state, note)
        maker = origin(self.program.functions[function], tops)
        if maker is not None:
            raise Found(self.lost(function, maker, tops))
        return outputs

    def lost(self, function: str, maker: Op, tops: dict[str, float]) -> LostNumbers:
        scopes = Lineage(self.program.functions[function]).scopes
        return LostNumbers(
            shard=self.shard,
            function=function,
            op=maker.name,
            kind=maker.kind,
            place=with_blocks(scopes.get(maker.outputs[0].name, ""), self.blocks),
            inputs=max((tops.get(name, 0.0) for name in maker.references()), default=0.0),
        )


def origin(function: MilFunction, tops: dict[str, float]) -> Op | None:
    """The op from which the infinity or NaN of a function's results comes; None if they have none.

    `tops` are the largest magnitudes of values by name. Infinity inside, as of an exponential that
    something divides by, does no harm."""
    index = FunctionIndex(function)
    written = (name for op in index.ops if op.kind == "write_state" for name in op.references())
    lost = {name for name, top in tops.items() if not isfinite(top)}
    results = (*written, *function.body.outputs)  # an output may come from a state, without a maker
    name = next((one for one in results if one in lost), None)
    maker = None
    while name is not None and (found := index.producer(name)) is not None:
        maker = found
        name = next((one for one in maker.references() if one in lost), None)
    return maker


def with_blocks(scope: str, blocks: tuple[str, ...]) -> str:
    """A place in a shard, with the plan's names of blocks in place of their numbers there."""
    for number, block in enumerate(blocks):
        scope = scope.replace(f"blocks_{number}_", f"{block}/")
    return scope


def seeking(engine: Engine, precision: Precision) -> Engine:
    """An engine whose packages run op by op in an arithmetic, until one gives infinity or NaN: for
    `first_lost`."""
    assert isinstance(engine.backend, Loading)
    seeker = Seeker(engine.backend, engine.plan, precision)
    return Engine(engine.plan, seeker, engine.tables, resident=False)


def first_lost(run: Callable[[], object]) -> LostNumbers | None:
    """Where a run of a `seeking` engine first gives infinity or NaN; None if it gives none on the
    reference executor."""
    try:
        run()
    except Found as found:
        return found.lost
    return None
