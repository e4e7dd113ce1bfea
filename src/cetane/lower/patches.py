"""Contexts in which coremltools converts without progress bars, and in less than half the time."""

import gc
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any

Patches = Sequence[tuple[Any, str, Any]]
"""Modules or classes, each with the name of an attribute and another value for it."""


@contextmanager
def patched(patches: Patches) -> Iterator[None]:
    """A context in which attributes have other values."""
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in patches]
    for owner, name, value in patches:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def quiet() -> Iterator[None]:
    """A context without progress bars and tracer warnings: the caller reports progress by shard."""
    import coremltools.converters.mil.frontend.torch.ops as torch_frontend
    import coremltools.converters.mil.mil.passes.pass_pipeline as passes

    def silent(iterable: Any, *_: Any, **__: Any) -> Any:
        return iterable

    bars = [(torch_frontend, "_tqdm", silent), (passes, "tqdm", silent)]
    with patched(bars), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def uncollected() -> Iterator[None]:
    """A context without collections of garbage.

    Most of the many objects that a conversion makes live until its end. coremltools collects after
    each conversion. That visits all objects of the process, and takes a quarter of a second. In a
    forked copy of the process it also copies all their pages.
    """
    collecting = gc.isenabled()

    def later(generation: int = 2) -> int:
        """In place of `gc.collect`."""
        return 0

    gc.disable()
    try:
        with patched([(gc, "collect", later)]):
            yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def brief() -> Iterator[None]:
    """A context in which a conversion takes less than half the time."""
    with patched([*unchecked(), *changes_only(), *indexed(), *described_once()]):
        yield


def unchecked() -> Patches:
    """coremltools checks a program after each of some 110 passes, and formats it for its log. Here
    only the caller checks the finished program, and these lines of the log are empty."""
    from coremltools.converters.mil.mil import Block, Program

    def trusted(program: Any, check_essential_scope: bool = False) -> None:
        """In place of `Program.validate`."""

    def unsaid(block: Any, indent: str | None = None, print_attr: bool | None = False) -> str:
        """In place of `Block.indented_str`."""
        return ""

    return [(Program, "validate", trusted), (Block, "indented_str", unsaid)]


def changes_only() -> Patches:
    """Most passes change nothing, and coremltools works after them all the same.

    - After each pass, it finds again which weights every value depends on. Here it does so only if
      a pass has set the inputs of an op.
    - After its search for transposes that cancel, it infers all types again. Here it does so only
      if some cancel.
    """
    from coremltools.converters.mil.mil import Block, Operation
    from coremltools.converters.mil.mil.passes.defs.optimize_repeat_ops import (
        _TransposeOptimization,
    )

    connected, depended = Operation._validate_and_set_inputs, Block._propagate_nonreplaceable_vars
    cancelled = _TransposeOptimization.apply_transform
    changes = count()
    latest = next(changes)
    known: dict[Any, int] = {}
    """The number of the latest change when a block's dependencies were found, by block."""

    def connect(op: Any, *given: Any, **named: Any) -> None:
        """`Operation._validate_and_set_inputs`, through which every input of an op is set."""
        nonlocal latest
        latest = next(changes)
        connected(op, *given, **named)

    def depend(block: Any) -> None:
        """`Block._propagate_nonreplaceable_vars`, if an input was set since its last run."""
        if known.get(block) != latest:
            depended(block)
            known[block] = latest

    def cancel(found: Any) -> None:
        """`_TransposeOptimization.apply_transform`, if it has anything to cancel."""
        found._verify_cancellable_transposes()
        if found.transpose_op_to_cancel_ops:
            cancelled(found)
        else:
            found.block.set_outputs([sink.x for sink in found.output_sink_ops])
            found.block.remove_ops(list(found.output_sink_ops))

    return [
        (Operation, "_validate_and_set_inputs", connect),
        (Block, "_propagate_nonreplaceable_vars", depend),
        (_TransposeOptimization, "apply_transform", cancel),
    ]


def indexed() -> Patches:
    """Torch's iterators over what a node has end with a C++ exception, which takes longer than all
    else that they do. Here indices replace them, and nodes without control flow have no blocks."""
    from torch._C import Node

    own_blocks = Node.blocks

    def inputs(node: Any) -> Iterator[Any]:
        return map(node.inputsAt, range(node.inputsSize()))

    def outputs(node: Any) -> Iterator[Any]:
        return map(node.outputsAt, range(node.outputsSize()))

    def blocks(node: Any) -> Iterable[Any]:
        return own_blocks(node) if node.kind() in ("prim::If", "prim::Loop") else ()

    return [(Node, "inputs", inputs), (Node, "outputs", outputs), (Node, "blocks", blocks)]


def described_once() -> Patches:
    """coremltools describes the type of each value anew; here each type only once."""
    from coremltools.converters.mil.mil.types import type_mapping

    return [(type_mapping, "get_type_info", cache(type_mapping.get_type_info))]
