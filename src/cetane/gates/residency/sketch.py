"""Sketches of a plan's programs, which rules can judge before any is lowered.

A sketch has every weight with a convolution that reads it, every cache that the graph writes by a
matrix product, and the states. The ops between them do not depend on the recipe; `cetane port`
audits them in its packages.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from cetane.compress import Format
from cetane.compress.formats import Fp16, Linear, Palette
from cetane.families import CacheSpec, Weight
from cetane.gates.residency.target import opset_of
from cetane.mil.program import (
    Body,
    MilFunction,
    NamedValue,
    Op,
    Program,
    StoredConstant,
    TensorType,
)
from cetane.planner import Planner
from cetane.planner.weights import format_of


def sketch(planner: Planner) -> dict[str, Program]:
    """A sketched program for every shard of a plan, by the shard's name."""
    made = {}
    opset = opset_of(planner.recipe.target.deployment)
    for shard in planner.members:
        functions = {}
        for graph in planner.graphs(shard):
            weights = [
                (f"{block.name}.{path}", weight)
                for block in graph.blocks
                for path, weight in block.weights()
                if weight.kind
            ]
            tokens, ops = graph.function.tokens, list[Op]()
            inputs: dict[str, TensorType] = {}
            for name, weight in weights:
                form = format_of(weight, planner.recipe.compression)
                inputs[f"{name}_x"] = TensorType((1, weight.shape[1], 1, tokens), "fp16")
                ops += reading(name, weight, form, tokens)
            for cache in graph.caches:
                if cache.form.contract in ("blend", "stateful-blend"):
                    ops += writing(cache, tokens, inputs)
            outputs = {op.outputs[0].name: op.outputs[0].type for op in ops if op.kind in RESULTS}
            states = {s.name: TensorType(s.shape, "fp16") for s in graph.function.states}
            body = Body((), tuple(ops), tuple(outputs))
            known = {name: type_ for name, type_ in outputs.items() if type_ is not None}
            name = graph.function.name
            functions[name] = MilFunction(name, inputs, known, states, body, opset=opset)
        made[shard] = Program(Path(shard), functions)
    return made


RESULTS = ("conv", "add")
"""Kinds of op whose results leave a sketched function."""


def writing(cache: CacheSpec, tokens: int, inputs: dict[str, TensorType]) -> Iterator[Op]:
    """The ops that write a cache: a mask keeps old columns, a matrix product adds the new ones.

    The ops' inputs are added to `inputs`."""
    _, heads, dim, slots = cache.shape
    whole = TensorType((1, heads, dim, slots), "fp16")
    names = [f"{cache.group}_{part}" for part in ("old", "keep", "new", "write")]
    old, keep, new, write = names
    shapes = ((1, heads, dim, slots), (1, 1, 1, slots), (1, heads, dim, tokens),
              (1, 1, tokens, slots))  # fmt: skip
    inputs |= {n: TensorType(s, "fp16") for n, s in zip(names, shapes, strict=True)}
    kept, made, joined = (NamedValue(f"{cache.group}_{n}", whole) for n in ("k", "m", "s"))
    yield Op("mul", kept.name, {"x": (old,), "y": (keep,)}, (kept,))
    yield Op("matmul", made.name, {"x": (new,), "y": (write,)}, (made,))
    yield Op("add", joined.name, {"x": (kept.name,), "y": (made.name,)}, (joined,))


def reading(name: str, weight: Weight, form: Format, tokens: int) -> Iterator[Op]:
    """The ops of a weight: its constant in a format, and a convolution with it."""
    dense = TensorType(weight.shape, "fp16")
    value = NamedValue(f"{name}_w", dense)
    parts: dict[str, tuple[str | StoredConstant, ...]]
    match form:
        case Fp16():
            yield Op("const", value.name, {"val": (stored(weight.shape, "fp16"),)}, (value,))
        case Linear():
            parts = {
                "data": (stored(weight.shape, f"int{form.bits}"),),
                "scale": (stored(form.scales(weight.shape), "fp16"),),
            }
            yield Op("constexpr_blockwise_shift_scale", value.name, parts, (value,))
        case Palette():
            indices = form.indices_shape(weight.shape)
            parts = {
                "indices": (stored(indices, f"uint{form.index_bits}"),),
                "lut": (stored(form.lut_shape(weight.shape), "fp16"),),
            }
            yield Op("constexpr_lut_to_dense", value.name, parts, (value,))
    result = NamedValue(f"{name}_y", TensorType((1, weight.shape[0], 1, tokens), "fp16"))
    yield Op("conv", f"{name}_y", {"x": (f"{name}_x",), "weight": (value.name,)}, (result,))


def stored(shape: tuple[int, ...], dtype: str) -> StoredConstant:
    """A constant of which only the type is known."""

    def nothing() -> NoReturn:
        raise AssertionError("residency rules read no weights")

    return StoredConstant(TensorType(shape, dtype), nothing)
