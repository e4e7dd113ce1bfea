"""Bound ops: closures with constants computed once, and values freed after their last use."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cetane.errors import CetaneError
from cetane.mil.constants import Constants
from cetane.mil.guard import failures_at
from cetane.mil.implementation import Implementation
from cetane.mil.index import FunctionIndex, flatten, foldable, last_uses, names_of
from cetane.mil.ops import OPS
from cetane.mil.program import (
    Argument,
    Body,
    MilFunction,
    NamedValue,
    Op,
    Precision,
    StoredConstant,
)
from cetane.mil.shapes import READ_TENSORS, RULES, KnownOp, result_shapes
from cetane.mil.storage import from_numpy, to_dtype

Environment = dict[str, Any]
"""Tensors and state cells of a run, by name."""
Known = dict[str, Any]
"""Tensors and strings that are the same in every run, by name."""
Decoded = dict[Hashable, tuple[Any, ...]]
"""Decoded weights, by declared type and `Constants.key`. Functions share equal weights."""
Watch = Callable[[str, Tensor], Tensor | None]
"""Called with the name and value of every result. A tensor that it returns replaces the value."""
BUDGET = ":bodies"
"""The key of an environment's `BodyBudget`: no value has this name."""
MOST_BODIES = 100_000
"""The most nested bodies that one run may enter."""


@dataclass
class BodyBudget:
    """The number of nested bodies that a run may still enter, so that every loop ends."""

    left: int = MOST_BODIES

    def spend(self) -> None:
        """Count one body. Raises CetaneError when the budget is spent."""
        self.left -= 1
        if self.left < 0:
            raise CetaneError(f"branches and loops of one run take more than {MOST_BODIES} steps")


@dataclass(frozen=True)
class BoundOp:
    """One bound op: computes its outputs from an environment, then frees values without readers."""

    compute: Callable[[Environment, Watch | None], tuple[Any, ...]]
    outputs: tuple[str, ...]
    frees: tuple[str, ...]


@dataclass(frozen=True)
class BoundBody:
    """A body with every op bound, ready to run in an environment."""

    steps: tuple[BoundOp, ...]
    outputs: tuple[str, ...]
    known: Known
    """The outputs that depend on no input."""

    def run(self, environment: Environment, watch: Watch | None) -> list[Any]:
        """The values of the body's outputs. The environment cannot be used again."""
        for step in self.steps:
            for name, value in zip(step.outputs, step.compute(environment, watch), strict=True):
                given = watch(name, value) if watch and isinstance(value, Tensor) else None
                environment[name] = value if given is None else given
            for name in step.frees:
                environment.pop(name, None)
        values = environment | self.known
        return [values[name] for name in self.outputs]


def bind(function: MilFunction, precision: Precision, decoded: Decoded) -> BoundBody:
    """Bind every op of a function.

    All precisions but "fp32" keep fp16 results to float16 values; "ane" has its own products of
    computed matrices. `decoded` holds the weights of functions that were bound before; this
    function's are added. Raises CetaneError for ops without an implementation, and for constants
    that cannot be decoded.
    """
    require_ops(function)
    ops = dict(OPS)
    if precision == "ane":
        from cetane.mil import ane  # compiles its loops

        ops |= {kind: replace(ops[kind], call=call) for kind, call in ane.PRODUCTS.items()}
    return _Binder(function, ops, precision != "fp32", decoded).body(function.body, {})


def require_ops(function: MilFunction) -> None:
    """Raise CetaneError, with every missing kind, if the table lacks ops of the function."""
    missing: dict[str, str] = {}
    for op in flatten(function.body):
        if op.kind != "const" and op.kind not in OPS:
            missing.setdefault(op.kind, op.name)
    if missing:
        places = ", ".join(f"{kind} (first: {name})" for kind, name in sorted(missing.items()))
        raise CetaneError(f"function {function.name} uses ops that cannot run here: {places}")


class _Binder:
    def __init__(
        self,
        function: MilFunction,
        ops: Mapping[str, Implementation],
        rounds: bool,
        decoded: Decoded,
    ) -> None:
        self._function, self._ops = function.name, ops
        self._constants = Constants(FunctionIndex(function))
        self._rounds, self._decoded = rounds, decoded

    def body(self, body: Body, outer: Known) -> BoundBody:
        """`outer` are the known values around the body, which its ops may also use."""
        known = dict(outer)
        steps = []
        for op, frees in zip(body.ops, last_uses(body), strict=True):
            outputs = tuple(value.name for value in op.outputs)
            if op.kind == "const":
                known.update(self._const(op))
            else:
                compute = self._bind(op, known)
                if foldable(op) and all(name in known for name in op.references()):
                    known.update(zip(outputs, self._folded(op, compute), strict=True))
                else:
                    steps.append(BoundOp(compute, outputs, frees))
            for name in frees:
                known.pop(name, None)
        results = {name: known[name] for name in body.outputs if name in known}
        return BoundBody(tuple(steps), body.outputs, results)

    def _folded(self, op: Op, compute: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
        """The results of an op on constants. Other functions share decoded weights."""
        if not op.kind.startswith("constexpr_"):
            return compute({}, None)
        key = (str(op.outputs[0].type), self._constants.key(op.outputs[0].name))
        if key not in self._decoded:
            self._decoded[key] = compute({}, None)
        return self._decoded[key]

    def _const(self, op: Op) -> Known:
        with failures_at(f"function {self._function}, const {op.name}"):
            (constant,), (output,) = op.inputs["val"], op.outputs
            if not isinstance(constant, StoredConstant):
                raise ValueError("its value is not a literal")
            return {output.name: self._constant(constant)}

    def _bind(self, op: Op, known: Known) -> Callable[..., tuple[Any, ...]]:
        """A closure that computes the op's outputs, rounded to their declared types."""
        implementation = self._ops[op.kind]
        # A device keeps decoded weights in the program's type.
        rounds = self._rounds or op.kind.startswith("constexpr_")
        where = f"function {self._function}, {op.kind} {op.name}"
        with failures_at(where):
            fixed, dynamic = self._arguments(op, implementation, known)
            check = self._size_check(op, implementation, known)
        bodies = [self.body(body, known) for body in op.bodies]

        def compute(environment: Environment, watch: Watch | None) -> tuple[Any, ...]:
            arguments = dict(fixed)
            if bodies:
                arguments["bodies"] = [
                    self._callable(body, inner.inputs, where, environment, watch)
                    for body, inner in zip(bodies, op.bodies, strict=True)
                ]
            with failures_at(where):
                if check is not None:
                    check(environment)
                for parameter, fetch in dynamic.items():
                    arguments[parameter] = fetch(environment)
                result = implementation.call(**arguments)
                results: tuple[Any, ...] = (result,)
                if result is None or isinstance(result, tuple):
                    results = result or ()
                return tuple(
                    self._settle(value, output, where, rounds)
                    for value, output in zip(results, op.outputs, strict=True)
                )

        return compute

    def _arguments(
        self, op: Op, implementation: Implementation, known: Known
    ) -> tuple[dict[str, Any], dict[str, Callable[[Environment], Any]]]:
        """The arguments known now, and functions that fetch the others from an environment."""
        fixed: dict[str, Any] = {}
        dynamic: dict[str, Callable[[Environment], Any]] = {}
        for parameter, passing, given in implementation.arguments(op):
            items = [
                self._constant(item)
                if isinstance(item, StoredConstant)
                else known.get(item, _Later(item))
                for item in given
            ]
            if any(isinstance(item, _Later) for item in items):
                dynamic[parameter] = _fetcher(passing, items)
            else:
                fixed[parameter] = _shaped(passing, items)
        return fixed, dynamic

    def _size_check(
        self, op: Op, implementation: Implementation, known: Known
    ) -> Callable[[Environment], None] | None:
        """A function that bounds the results of an op before a run computes them.

        None if all shapes are fixed and all parameters literals: then the check of the program has
        done it. It knows no parameter that ops compute from literals.
        """
        also = READ_TENSORS.get(op.kind, ())
        plain = [n for n, how in implementation.passing.items() if how == "plain" or n in also]
        read = (a for n in plain for a in op.inputs.get(n, ()) if isinstance(a, str))
        makers = [self._constants.producer(a) if a in self._constants else None for a in read]
        literals = all(maker is not None and maker.kind == "const" for maker in makers)
        static = all(v.type is not None and v.type.static_shape is not None for v in op.outputs)
        if op.kind not in RULES or (static and literals):
            return None

        given = {name: known[name] for name in names_of(op) if name in known}

        def check(environment: Environment) -> None:
            def value(argument: Argument) -> Any:
                if isinstance(argument, StoredConstant):
                    return self._constant(argument)
                return given[argument] if argument in given else environment[argument]

            def shape(argument: Argument) -> tuple[int, ...] | None:
                tensor = value(argument)
                return tuple(tensor.shape) if isinstance(tensor, Tensor) else None

            def plain_value(argument: Argument) -> Any:
                tensor = value(argument)
                return tensor.tolist() if isinstance(tensor, Tensor) else tensor

            result_shapes(KnownOp(op, shape, plain_value))

        return check

    def _callable(
        self,
        body: BoundBody,
        inputs: tuple[NamedValue, ...],
        where: str,
        environment: Environment,
        watch: Watch | None,
    ) -> Callable[[list[Any]], list[Any]]:
        """A body as a function. The size checks of its ops rely on its inputs' declared types."""

        def run(values: list[Any]) -> list[Any]:
            environment[BUDGET].spend()
            given = {
                own.name: self._settle(value, own, where, self._rounds)
                for own, value in zip(inputs, values, strict=True)
            }
            return body.run({**environment, **given}, watch)

        return run

    def _constant(self, constant: StoredConstant) -> Tensor | str | list[str]:
        if constant.type.dtype == "string":
            strings: str | list[str] = constant.numpy().tolist()
            return strings
        return from_numpy(constant.numpy(), constant.type.dtype)

    @staticmethod
    def _settle(value: Any, output: NamedValue, where: str, rounds: bool) -> Any:
        """A tensor in its declared type, rounded. CetaneError for a shape that does not fit.

        Lists, classes and their probabilities stay as they are.
        """
        if not isinstance(value, Tensor):
            return value
        if output.type is None:
            raise CetaneError(f"{where}: {output.name} should not be a tensor")
        if not output.type.accepts(tuple(value.shape)):
            raise CetaneError(
                f"{where}: {output.name} has the shape {tuple(value.shape)}, but is declared as "
                f"{output.type}"
            )
        return to_dtype(value, output.type.dtype, rounds)


@dataclass(frozen=True)
class _Later:
    """The name of a value that is computed in each run."""

    name: str


def _fetcher(passing: str, items: list[Any]) -> Callable[[Environment], Any]:
    def fetch(environment: Environment) -> Any:
        values = [environment[i.name] if isinstance(i, _Later) else i for i in items]
        return _shaped(passing, values)

    return fetch


def _shaped(passing: str, items: list[Any]) -> Any:
    """An argument as the op's function takes it."""
    if passing == "tensors":
        return items
    (item,) = items
    return item.tolist() if passing == "plain" and isinstance(item, Tensor) else item
