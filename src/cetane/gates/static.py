"""Static checks: a bundle's packages against its manifest, and against each other.

A package that was made for another context loads and runs, but gives wrong tokens. A published port
had to rebuild the last chunk of an 8K model because its mask was 2048 long. A hash only tells that
a file has changed, and nothing if the manifest was written again. Only specifications and headers
are read, no weights: this takes less than a second for a large model.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.gates.residency.target import opset_of
from cetane.mil import MilFunction, TensorType, load
from cetane.mil.opsets import VERSIONS
from cetane.mil.program import Feature, Features, Program
from cetane.schema.function import Function, Step
from cetane.schema.interface import (
    Embedding,
    FromCache,
    FromTensor,
    Input,
    Mask,
    Output,
    PositionRows,
    Rotary,
    State,
    ToTensor,
    WriteMask,
)
from cetane.schema.manifest import rotary_path
from cetane.schema.plan import Plan
from cetane.validation import Data


class PackageProblem(Data):
    """A problem, and its place: a package and its function, or a file."""

    where: str
    problem: str

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}"


def static_checks(bundle: Bundle) -> list[PackageProblem]:
    """The problems of an opened bundle that show without running it. `Bundle.verify` checks hashes.

    The checks are:

    - Every package has the manifest's functions. They have its inputs, outputs and states, by name,
      shape and dtype. So masks and caches fit the context and the heads: opening has refused a
      manifest in which they do not (`check_caches`).
    - The package describes the same inputs, outputs and states. Core ML calls by the description.
      It is of the specification and the opset of the manifest's deployment target.
    - What one package hands on has the shape that the next one takes.
    - Tables have a row for every token and position, and the channels that functions take.
    - A head of some tokens has those without which some texts cannot be written, or cannot end.
    """
    plan = bundle.plan
    problems = [*tables(bundle), *lacking_tokens(bundle)]
    for shard in plan.shards:
        try:
            program = load(bundle.shard(shard.name))
        except CetaneError as error:
            problems.append(PackageProblem(where=shard.name, problem=error.message))
            continue
        functions = program.functions
        wanted = {function.name: function for function in shard.functions}
        problems += other_names(shard.name, "function", set(wanted), set(functions))
        problems += made_for(plan, shard.name, program)
        for name in wanted.keys() & functions.keys():
            where, own, actual = f"{shard.name}/{name}", wanted[name], functions[name]
            problems += list(interface(plan, where, own, actual)) or description_problems(
                where, own, actual
            )
    return problems + list(handed_on(plan))


def made_for(plan: Plan, shard: str, program: Program) -> Iterator[PackageProblem]:
    """Problems of a package that is for other systems than the manifest's target."""
    target = plan.recipe.target.deployment
    opset = opset_of(target)
    others = {f.opset for f in program.functions.values()} - {opset}
    if program.version != VERSIONS[opset] or others:
        given = f"version {program.version} and {max(others, default=opset)}"
        wanted = f"version {VERSIONS[opset]} and {opset}, as for {target}"
        yield PackageProblem(where=shard, problem=f"made for {given}, not {wanted}")


def other_names(
    where: str, what: str, wanted: set[str], there: set[str]
) -> Iterator[PackageProblem]:
    """Problems of missing and of unexpected names."""
    for name in sorted(wanted - there):
        yield PackageProblem(where=where, problem=f"no {what} {name}, which the manifest has")
    for name in sorted(there - wanted):
        yield PackageProblem(where=where, problem=f"the {what} {name} is not in the manifest")


def interface(
    plan: Plan, where: str, wanted: Function, actual: MilFunction
) -> Iterator[PackageProblem]:
    """Problems of a package's function, compared with the manifest's."""
    Ports = tuple[str, tuple[Input | Output | State, ...], Mapping[str, TensorType]]
    kinds: tuple[Ports, ...] = (
        ("input", wanted.inputs, actual.inputs),
        ("output", wanted.outputs, actual.outputs),
        ("state", wanted.states, actual.states),
    )
    for kind, ports, there in kinds:
        yield from other_names(where, kind, {port.name for port in ports}, set(there))
        for port in ports:
            type_ = there.get(port.name)
            if type_ is not None and not (fits(port.shape, type_) and type_.dtype == port.dtype):
                given = type_.default or type_.shape
                why = reason(plan, port, given)
                problem = f"{port.name} is {type_.dtype} {given}, not {port.dtype} {port.shape}"
                yield PackageProblem(where=where, problem=f"{problem}{why}")


def description_problems(
    where: str, wanted: Function, actual: MilFunction
) -> Iterator[PackageProblem]:
    """Problems of a function's description, compared with the manifest's function."""
    told = actual.interface or Features()
    kinds: tuple[tuple[str, tuple[Input | Output | State, ...], Mapping[str, Feature]], ...] = (
        ("input", wanted.inputs, told.inputs),
        ("output", wanted.outputs, told.outputs),
        ("state", wanted.states, told.states),
    )
    for kind, ports, there in kinds:
        yield from other_names(
            where, f"described {kind}", {port.name for port in ports}, set(there)
        )
        for port in ports:
            own = there.get(port.name)
            untold = port.shape if kind == "output" else ()  # only outputs need not tell it
            if own and (own.form, own.shape or untold) != (port.dtype, port.shape):
                problem = f"{port.name} is described as {own.form} {own.shape}"
                yield PackageProblem(
                    where=where, problem=f"{problem}, not {port.dtype} {port.shape}"
                )


def fits(shape: tuple[int, ...], actual: TensorType) -> bool:
    """Whether a package's type has the manifest's shape, a flexible type as its default."""
    return actual.default == shape if actual.default is not None else actual.accepts(shape)


def reason(plan: Plan, port: Input | Output | State, given: tuple[Any, ...]) -> str:
    """The likely cause of other sizes, in words; empty if unknown."""
    source = getattr(port, "source", None)
    if not isinstance(source, Mask | WriteMask | FromCache) or len(given) != len(port.shape):
        return ""
    if given[-1] == port.shape[-1]:
        return f": other heads than the group {source.group} of this bundle"
    return (
        f": made for another context or window than {plan.recipe.cache.context} tokens "
        f"and {plan.caches[source.group].count} slots of {source.group}"
    )


def handed_on(plan: Plan) -> Iterator[PackageProblem]:
    """Problems of tensors that one function writes and a later one takes in another shape."""
    every = [modes for one in plan.capacities for modes in (one.modes, *one.adapters.values())]
    for mode, steps in (pair for modes in every for pair in modes.items()):
        for calls in (steps.silent, steps.steps):
            made: dict[str, tuple[str, tuple[int, ...]]] = {}
            for step in calls:
                if not isinstance(step, Step):
                    continue  # experts make and take columns of some tokens
                function = plan.functions[step.shard, step.function]
                for item in function.inputs:
                    if not isinstance(item.source, FromTensor) or item.source.name not in made:
                        continue
                    maker, shape = made[item.source.name]
                    if shape != item.shape:
                        yield PackageProblem(
                            where=f"{step.shard}/{step.function}",
                            problem=f"{item.name} is {item.shape}, but {maker} writes {shape} "
                            f"({mode})",
                        )
                for output in function.outputs:
                    if isinstance(output.sink, ToTensor):
                        made[output.sink.name] = step.shard, output.shape


def lacking_tokens(bundle: Bundle) -> Iterator[PackageProblem]:
    """The problem of a head that lacks tokens which every text may need. A build refuses it, but a
    bundle's recipe may have been written again."""
    subset = bundle.plan.recipe.head.subset
    if subset is not None:
        try:
            subset.check(bundle.tokenizer)
        except CetaneError as error:
            yield PackageProblem(where="head", problem=error.message)


def tables(bundle: Bundle) -> Iterator[PackageProblem]:
    """Problems of host tables, compared with the functions that take their rows."""
    plan = bundle.plan
    try:
        rotary = {name: table.shape for name, table in bundle.tables().rotary.items()}
    except CetaneError as error:  # their lengths are checked there
        yield PackageProblem(where="tables", problem=error.message)
        return
    seen = set()
    for function in plan.functions.values():
        for item in function.inputs:
            source, channels = item.source, prod(item.shape) // function.tokens
            if isinstance(source, Rotary):
                where, there = rotary_path(source.table), rotary[source.table][2]
            elif isinstance(source, Embedding | PositionRows):
                where, there = f"table {source.table}", plan.tables[source.table].channels
            else:
                continue
            if there != channels and (where, channels) not in seen:
                seen.add((where, channels))
                yield PackageProblem(
                    where=where, problem=f"{there} channels, but {item.name} takes {channels}"
                )
