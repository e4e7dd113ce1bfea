"""The tracing of a function's module into a graph whose weights are names without values.

While a graph is traced, the parameters of its blocks are results of the torch op
`cetane::constant`. So neither torch nor coremltools ever sees a weight.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from cetane.compress import Format
from cetane.families import Block, Weight
from cetane.planner import FunctionGraph, Programs
from cetane.planner.weights import format_of
from cetane.schema.interface import Input, Position

TORCH = {"fp16": torch.float32, "int32": torch.int32, "int8": torch.int8}
"""The torch type of an input, by its dtype in the plan. Lowering turns fp32 into fp16."""
SMALLEST_FP16 = 2.0**-24
"""The smallest positive fp16 number. Lowering raises smaller epsilons to it. They would round to
zero, and the norm of zeros, such as padding, would divide by zero."""


@torch.library.custom_op("cetane::constant", mutates_args=())
def constant(label: str, shape: str) -> Tensor:
    """A stand-in for the weight `label`: zeros of a shape such as "8x4x1x1", float32.

    All elements share the memory of one.

    The shape is a string because jit's tracer fails on an op with a list.
    """
    return torch.zeros(()).expand([int(size) for size in shape.split("x")])


@dataclass(frozen=True)
class LabelledWeight:
    """A weight of a shard, with a label that the shard's functions share."""

    label: str
    block: Block
    path: str
    """The name of the parameter in the block, with dots."""
    weight: Weight
    format: Format


def labelled_weights(planner: Programs, shard: str, graph: FunctionGraph) -> list[LabelledWeight]:
    """The weights that a graph uses.

    A label names the place in the shard, not the checkpoint's tensor. So shards of one structure
    have the same labels.
    """
    index = {block: number for number, block in enumerate(planner.members[shard])}
    rules = planner.recipe.compression
    return [
        LabelledWeight(
            f"blocks.{index[block.root]}.{path}",
            block.root,
            path,
            weight,
            format_of(weight, rules),
        )
        for block in graph.blocks
        for path, weight in block.weights(graph.function.adapter)
    ]


def trace(planner: Programs, shard: str, graph: FunctionGraph) -> torch.jit.ScriptModule:
    """The TorchScript module of a graph, whose weights are results of `cetane::constant`.

    It is traced on the CPU, since torch's kernels for the meta device cannot be traced.
    """
    module = planner.module(graph).eval()

    def named(item: LabelledWeight) -> Tensor:
        shape = "x".join(map(str, item.weight.shape))
        made: Tensor = torch.ops.cetane.constant(item.label, shape)
        return made

    used = labelled_weights(planner, shard, graph)
    with replaced(used) as replace, torch.no_grad(), without_compiler():
        module.register_forward_pre_hook(lambda *_: replace(named))
        examples = tuple(example(item, "cpu") for item in graph.function.inputs)
        traced: torch.jit.ScriptModule = torch.jit.trace(module, examples, check_trace=False)
    return traced


@contextmanager
def without_compiler() -> Iterator[None]:
    """A context in which torch does not load its compiler, which takes most of a second.

    Some of torch's functions are hidden from the compiler: their first call loads it and asks for
    `disable`. The stand-in module answers with the function itself.
    """
    name = "torch._dynamo"
    if name in sys.modules:
        yield
        return
    absent = ModuleType(name)
    absent.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    sys.modules[name] = torch._dynamo = absent
    try:
        yield
    finally:
        del sys.modules[name], torch._dynamo


@contextmanager
def replaced(
    used: list[LabelledWeight],
) -> Iterator[Callable[[Callable[[LabelledWeight], Tensor]], None]]:
    """A context that gives a function which replaces the parameters `used`, and that restores them
    afterwards.

    torch's own `functional_call` refuses to run while jit traces.
    """
    places = []
    for item in used:
        parent, _, leaf = item.path.rpartition(".")
        places.append((item.block.get_submodule(parent)._parameters, leaf, item))
    before = [held[leaf] for held, leaf, _ in places]

    def replace(make: Callable[[LabelledWeight], Tensor]) -> None:
        for held, leaf, item in places:
            held[leaf] = make(item)  # type: ignore[assignment]

    try:
        yield replace
    finally:
        for (held, leaf, _), parameter in zip(places, before, strict=True):
            held[leaf] = parameter


def example(item: Input, device: str) -> Tensor:
    """Zeros for an input. Positions stay on the CPU, since slices read them."""
    device = "cpu" if isinstance(item.source, Position) else device
    return torch.zeros(item.shape, dtype=TORCH[item.dtype], device=device)
