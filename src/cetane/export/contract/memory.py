"""The memory that a bundle needs, by what holds it: computed from shapes, measured on no device."""

from collections.abc import Collection

from cetane.bundle import Bundle
from cetane.mil import MilFunction, Program, TensorType
from cetane.mil.dtypes import byte_count
from cetane.mil.index import FunctionIndex
from cetane.schema.function import Function
from cetane.schema.interface import FromCache, FromHistory, FromMatrix, Input, Output
from cetane.schema.manifest import shard_path
from cetane.validation import Data


class MemoryFigures(Data):
    """Bytes, computed from shapes and file sizes. A runtime's own overhead is not in them."""

    packages: dict[str, int]
    """Every shard's package. A runtime may hold it once for each function that it loads."""
    tables: int
    """The host's tables. Mapped from disk, they need not be in memory."""
    caches: int
    """Buffers that the host keeps: caches and histories in fp16 or int8, matrices in fp32."""
    states: int
    """The MLStates of one sequence, at all capacities."""
    call: int
    """The largest call: its inputs and outputs, without the host's buffers."""
    activations: int
    """The largest sum of intermediate values that are alive at once in a function, in the order
    of its ops. A compiler that fuses ops needs less."""

    def as_json(self) -> dict[str, int]:
        """The figures with all packages together, and their sum as `peak`. The host's buffers
        count twice there, since a call may take one and give another."""
        figures: dict[str, int] = self.model_dump() | {"packages": sum(self.packages.values())}
        return figures | {"peak": sum(figures.values()) + self.caches}


def memory_figures(bundle: Bundle, programs: Collection[Program]) -> MemoryFigures:
    """The memory of a bundle, whose packages are `programs`."""
    plan, files = bundle.plan, bundle.manifest.files
    functions = list(plan.functions.values())
    buffers = {
        item.source.name: byte_count(item.dtype, item.shape)
        for function in functions
        for item in function.inputs
        if isinstance(item.source, FromCache | FromHistory) and function.capacity is None
    }
    matrices = {
        item.source.name: byte_count("fp32", item.shape)
        for function in functions
        for item in function.inputs
        if isinstance(item.source, FromMatrix)
    }
    states = {
        (function.owner, function.capacity, state.name): byte_count(state.dtype, state.shape)
        for function in functions
        for state in function.states
    }
    sizes = {name: record.bytes for name, record in files.items()}
    return MemoryFigures(
        packages={
            shard.name: sum(
                size
                for name, size in sizes.items()
                if name.startswith(f"{shard_path(shard.name)}/")
            )
            for shard in plan.shards
        },
        tables=sum(size for name, size in sizes.items() if name.endswith(".npy")),
        caches=sum(buffers.values()) + sum(matrices.values()),
        states=sum(states.values()),
        call=max(call_bytes(function) for function in functions),
        activations=max(
            activation_bytes(function)
            for program in programs
            for function in program.functions.values()
        ),
    )


def call_bytes(function: Function) -> int:
    """Bytes of a function's inputs and outputs, without caches and histories that it reads."""
    given = [i for i in function.inputs if not isinstance(i.source, FromCache | FromHistory)]
    ports: list[Input | Output] = [*given, *function.outputs]
    return sum(byte_count(port.dtype, port.shape) for port in ports)


def activation_bytes(function: MilFunction) -> int:
    """The largest sum of a function's intermediate values that are alive at once."""
    index = FunctionIndex(function)
    last: dict[str, int] = {}  # the place of each value's last reader, or of its maker
    for at, op in enumerate(index.ops):
        last |= dict.fromkeys((*(value.name for value in op.outputs), *op.references()), at)
    alive: dict[str, int] = {}
    most = 0
    for at, op in enumerate(index.ops):
        for value in op.outputs:
            if value.name not in index.fixed and value.name not in function.outputs:
                alive[value.name] = type_bytes(value.type)
        most = max(most, sum(alive.values()))
        alive = {name: size for name, size in alive.items() if last[name] > at}
    return most


def type_bytes(type_: TensorType | None) -> int:
    """Bytes of a value; 0 if its shape is known only at run time."""
    shape = None if type_ is None else type_.static_shape
    return 0 if type_ is None or shape is None else byte_count(type_.dtype, shape)
