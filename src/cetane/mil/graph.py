"""How the values of a function depend on each other, and which depend on nothing."""

from __future__ import annotations

from collections.abc import Iterator

from cetane.mil.dtypes import Array
from cetane.mil.executor import Executable
from cetane.mil.ops.registry import NEVER_FOLDED
from cetane.mil.program import Block, Constant, Function, Op, TensorType

SUFFIXES = ("_to_fp16", "_cast_fp16", "_to_fp32", "_cast_fp32", "_promoted", "_palettized",
            "_quantized", "_sparsified")  # fmt: skip
"""What coremltools appends to a name when it changes how a value is stored."""
FLOATS = ("fp16", "fp32")


class Graph:
    """A function's values by name: the ops that make them, their types, and the constants."""

    def __init__(self, function: Function) -> None:
        self.producers: dict[str, Op] = {}
        self.types: dict[str, TensorType | None] = dict(function.inputs)
        self.known: set[str] = set()
        """Names of constants, and of what is computed from constants alone."""
        self.scopes: dict[str, str] = {}
        """Where in the torch model a value is made, as far as a package tells: coremltools drops
        its scopes on saving, but names weights by their modules. So it is the op's weight, or
        `after` the last weight that had a part in the op's inputs."""
        self.before: dict[str, str] = {}
        """What a cast between float types was given, by the name of its result."""
        self._order: dict[str, int] = {}
        self._scan(function.block)

    def _scan(self, block: Block) -> None:
        self.types.update((value.name, value.type) for value in block.inputs)
        for op in block.ops:
            names = [value.name for value in op.outputs]
            # A cast of what is there to a new name: so no chain of casts leads to its own start.
            earlier = (
                names[:1]
                and names[0] not in self.types
                and self.types.keys() >= {name for _, name in self.inputs(op)}
            )
            self.producers.update(dict.fromkeys(names, op))
            self.types.update((value.name, value.type) for value in op.outputs)
            if op.kind == "const" or (
                op.kind not in NEVER_FOLDED and self.known.issuperset(op.references())
            ):
                self.known.update(names)
                continue
            if earlier and self.casts(op):
                self.before[names[0]] = next(self.inputs(op))[1]
            if scope := self._scope(op):
                self.scopes.update(dict.fromkeys(names, scope))
            for inner in op.blocks:
                self._scan(inner)

    def _scope(self, op: Op) -> str:
        if weight := self.weight(op).removesuffix("_weight"):
            self._order[f"after {weight}"] = len(self._order)
            return weight
        before = {f"after {found.removeprefix('after ')}" for _, name in self.inputs(op)
                  if (found := self.scopes.get(name))}  # fmt: skip
        return max(before, key=lambda scope: self._order.get(scope, 0), default="")

    def live(self, block: Block) -> list[Op]:
        """The ops of a block that run."""
        return [
            op
            for op in block.ops
            if op.kind != "const" and not (op.outputs and op.outputs[0].name in self.known)
        ]

    def inputs(self, op: Op) -> Iterator[tuple[str, str]]:
        """Parameter and name of everything that an op takes and that is no constant."""
        for parameter, items in sorted(op.inputs.items()):
            for index, item in enumerate(items):
                if isinstance(item, str) and item not in self.known:
                    yield parameter if len(items) == 1 else f"{parameter}[{index}]", item

    def weight(self, op: Op) -> str:
        """The name of the first weight that an op takes, or "" if it has none."""
        for parameter in ("weight", "gamma", "x", "y"):
            for item in op.inputs.get(parameter, ()):
                if isinstance(item, str) and item in self.known and self._is_weight(item):
                    return plain(item)
        return ""

    def _is_weight(self, name: str) -> bool:
        type_ = self.types[name]
        return type_ is not None and type_.dtype in FLOATS and bool(type_.shape)

    def casts(self, op: Op) -> bool:
        """Whether an op changes the float type of a value, and nothing else."""
        if op.kind not in ("cast", "identity") or len(op.outputs) != 1 or not any(self.inputs(op)):
            return False
        types = self.types[op.outputs[0].name], self.types.get(next(self.inputs(op))[1])
        return op.kind == "identity" or all(t is not None and t.dtype in FLOATS for t in types)

    def source(self, name: str) -> str:
        """The value that `name` is, but for its float type."""
        while name in self.before:
            name = self.before[name]
        return name

    def constant(self, argument: str | Constant) -> Array | None:
        """The value of an op's argument, decoded; None if it is no constant."""
        if isinstance(argument, Constant):
            return argument.numpy()
        if argument not in self.known:
            return None
        made = self.producers[argument]
        if made.kind == "const":
            return self.constant(made.inputs["val"][0])
        type_ = self.types[argument]
        if type_ is None:
            return None
        body = Block((), tuple(self._needed(made, set())), (argument,))
        result: Array = Executable(
            Function("constant", {}, {argument: type_}, {}, body), "fp32"
        )({})[argument]  # fmt: skip
        return result

    def _needed(self, op: Op, seen: set[int]) -> Iterator[Op]:
        """An op after all the ops that it needs, each once."""
        if id(op) not in seen:
            seen.add(id(op))
            for name in op.references():
                yield from self._needed(self.producers[name], seen)
            yield op


def plain(name: str) -> str:
    """A name without what the converter appended to it."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return plain(name.removesuffix(suffix))
    return name
