"""The structure of a shard: a hash of everything that its programs depend on, except the values of
weights. Shards of one structure share a template.

The hash is made from the forms of the shard's functions. Functions of one form share a conversion.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cetane.hardware.quiet import import_coremltools
from cetane.lower.recorder import Recorder, Slice, recorded
from cetane.lower.tracing import labelled_weights
from cetane.planner import FunctionGraph, Programs
from cetane.schema.function import Function
from cetane.schema.interface import Input, Output, State


@dataclass(frozen=True)
class Form:
    """Everything that a function's program depends on, except the values of weights.

    Programs of functions with equal `lines` differ only in the names of weights, and in the places
    of slices. The experts of a layer are an example.
    """

    name: str
    lines: tuple[str, ...]
    """Interface, shapes of weights, and operations."""
    weights: tuple[tuple[str, str], ...]
    """The label and the format's name of each weight."""
    slices: tuple[Slice, ...]


def structure(planner: Programs, forms: list[Form]) -> str:
    """A hash that is equal for shards whose programs differ only in the values of weights."""
    target = planner.recipe.target.deployment
    versions = [torch.__version__, import_coremltools().__version__]
    digest = hashlib.sha256(json.dumps([target, *versions]).encode())
    for form in forms:
        for line in (json.dumps([form.name, form.weights, form.slices]), *form.lines):
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


def functions_with_widest(
    planner: Programs, shard: str
) -> Iterator[tuple[FunctionGraph, Function]]:
    """Every function of a shard, each with the same function at its largest number of tokens."""
    wides = (graph.function for graph in planner.widest(shard))
    return zip(planner.graphs(shard), wides, strict=True)


def forms(planner: Programs, shard: str) -> list[Form]:
    """The forms of a shard's functions."""
    return [
        form_of(planner, shard, graph, wide)
        for graph, wide in functions_with_widest(planner, shard)
    ]


def form_of(planner: Programs, shard: str, graph: FunctionGraph, wide: Function) -> Form:
    """The form of a function. Raises CetaneError as `recorded`."""
    function, used = graph.function, labelled_weights(planner, shard, graph)
    ports: list[Input | Output | State] = [*function.inputs, *function.outputs, *function.states]
    record = recorded(planner, graph, used)
    return Form(
        name=function.name,
        lines=(
            planner.recipe.cache.contract,
            *(json.dumps([item.name, item.shape, item.dtype]) for item in (*ports, *wide.inputs)),
            *(str(item.weight.shape) for item in used),
            *record.lines,
        ),
        weights=tuple((item.label, item.format.name) for item in used),
        slices=tuple(record.slices),
    )


def records(planner: Programs, shard: str) -> dict[str, Recorder]:
    """The records of a shard's functions, by name. Raises CetaneError as `recorded`."""
    return {
        graph.function.name: recorded(planner, graph, labelled_weights(planner, shard, graph))
        for graph in planner.graphs(shard)
    }
