"""Facts for an app's developer: files, the calls of a step, every function's tensors, memory."""

from collections.abc import Iterator
from typing import assert_never

from cetane.bundle import Bundle
from cetane.report.content import (
    CallOrder,
    CallSignature,
    DiskUse,
    FileRow,
    ForDevelopers,
    MemoryRow,
    TensorRow,
)
from cetane.schema.function import Function, Route, Step
from cetane.schema.interface import (
    Embedding,
    FromCache,
    FromHistory,
    FromMatrix,
    FromTensor,
    Mask,
    Position,
    Rotary,
    Sink,
    Source,
    ToCache,
    ToChoice,
    ToHistory,
    TokenIds,
    ToLogits,
    ToMatrix,
    ToTensor,
    WriteMask,
)
from cetane.schema.manifest import MANIFEST, TOKENIZER
from cetane.schema.plan import Plan


def for_developers(bundle: Bundle, disk: DiskUse) -> ForDevelopers:
    """The facts of a bundle that an app needs."""
    plan = bundle.plan
    memory = tuple(memory_rows(plan, disk))
    return ForDevelopers(
        context=plan.recipe.cache.context,
        deployment=plan.recipe.target.deployment,
        files=tuple(file_rows(bundle, disk)),
        calls=tuple(
            CallOrder(mode=mode, tokens=steps.tokens, calls=tuple(map(call, steps.steps)))
            for mode, steps in plan.modes.items()
        ),
        interfaces=tuple(interfaces(plan)),
        memory=memory,
        total=sum(row.bytes for row in memory),
    )


def file_rows(bundle: Bundle, disk: DiskUse) -> Iterator[FileRow]:
    """Every file. A package is one row, and so is the tokenizer."""
    kinds = {shard.name: (shard.kind, len(shard.blocks)) for shard in bundle.plan.shards}
    for part in disk.parts:
        if part.name in kinds:
            kind, blocks = kinds[part.name]
            holds = {"layers": f"{blocks} blocks of the model",
                     "head": "a slice of the head",
                     "model": "the whole model"}[kind]  # fmt: skip
            yield FileRow(path=f"shards/{part.name}.mlpackage", bytes=part.bytes, holds=holds)
        else:
            yield FileRow(path=part.name, bytes=part.bytes, holds=host_file(part.name))
    size = (bundle.path / MANIFEST).stat().st_size
    yield FileRow(path=MANIFEST, bytes=size, holds="everything in this section, as JSON")


def host_file(name: str) -> str:
    """The purpose of a file outside the packages."""
    if name.startswith("embedding"):
        return "a row for each token; the app looks it up"
    if name.startswith("rotary"):
        return "cosines and sines by position; the app looks them up"
    if name.startswith("heads/"):
        return "a draft head, which proposes tokens"
    return "Hugging Face tokenizer and chat template" if name == TOKENIZER else ""


def call(step: Step | Route) -> str:
    """One call of a mode, in words."""
    if isinstance(step, Step):
        return f"{step.shard} · {step.function}"
    return f"{step.shard} · one of {len(step.experts)} experts, chosen by {step.scores}"


def interfaces(plan: Plan) -> Iterator[CallSignature]:
    """The functions of all shards; functions with equal tensors are grouped."""
    groups: dict[tuple[int, tuple[TensorRow, ...]], list[tuple[str, str]]] = {}
    for (shard, name), function in plan.functions.items():
        tensors = tuple(tensor_rows(function, shard))
        groups.setdefault((function.tokens, tensors), []).append((shard, name))
    for (tokens, tensors), owners in groups.items():
        yield CallSignature(
            shards=tuple(dict.fromkeys(shard for shard, _ in owners)),
            functions=tuple(dict.fromkeys(name for _, name in owners)),
            tokens=tokens,
            tensors=tensors,
        )


def tensor_rows(function: Function, shard: str) -> Iterator[TensorRow]:
    """A function's inputs, outputs and states. Names of the shard's own caches lose its name."""
    for tensor in function.inputs:
        yield TensorRow(direction="input", name=tensor.name, dtype=tensor.dtype,
                        shape=tensor.shape, role=given(tensor.source, shard))  # fmt: skip
    for result in function.outputs:
        yield TensorRow(direction="output", name=result.name, dtype=result.dtype,
                        shape=result.shape, role=taken(result.sink, shard))  # fmt: skip
    for state in function.states:
        yield TensorRow(direction="state", name=state.name, dtype=state.dtype,
                        shape=state.shape, role="an MLState: Core ML keeps it")  # fmt: skip


def given(source: Source, shard: str) -> str:
    """The value that an app passes as an input, in words."""
    match source:
        case Embedding(table=table):
            return f"each token's row of the table {table}"
        case TokenIds():
            return "the tokens' ids"
        case Rotary(table=table, part=part):
            return f"{part} rows of the positions, rotary-{table}.npy"
        case Mask(group=group, window=window):
            seen = "earlier tokens" if window is None else f"the last {window:,} tokens"
            return f"0 where {seen} in cache {group} may be seen, -40,000 elsewhere"
        case WriteMask(group=group):
            return f"1 at the slot of cache {group} that each token takes, 0 elsewhere"
        case Position(group=group):
            return f"the first slot of cache {group} to write"
        case FromTensor(name=name):
            return f"{name}, from an earlier call"
        case FromCache(name=name):
            return f"the buffer {own(name, shard)}, which the app keeps"
        case FromHistory(name=name):
            return f"the last columns of {own(name, shard)}; zeros at first"
        case FromMatrix(name=name):
            return f"the matrices {own(name, shard)}, which the app keeps; zeros at first"
        case _:
            assert_never(source)


def taken(sink: Sink, shard: str) -> str:
    """An app's use of an output, in words."""
    match sink:
        case ToTensor(name=name):
            return f"{name}, for a later call"
        case ToCache(name=name, write=write):
            verb = "append it to" if write == "append" else "it replaces"
            return f"{verb} the buffer {own(name, shard)}"
        case ToLogits(start=start, stop=stop):
            return f"logits of rows {start:,} to {stop - 1:,} of the vocabulary"
        case ToChoice(part=part, start=start, stop=stop, block=block):
            form = f", as blocks of {block} and rows after them," if block > 1 else ""
            what = f"the best row{form}" if part == "row" else "the best row's logit"
            return f"{what} of {start:,} to {stop - 1:,}"
        case ToHistory(name=name):
            return f"append it to {own(name, shard)}"
        case ToMatrix(name=name):
            return f"fold it into {own(name, shard)}: keys, values, logarithms of decays"
        case _:
            assert_never(sink)


def own(name: str, shard: str) -> str:
    """A buffer's name, without the shard's name if the shard owns it."""
    return name.removeprefix(f"{shard}.")


def memory_rows(plan: Plan, disk: DiskUse) -> Iterator[MemoryRow]:
    """The memory of a running app. Core ML's own buffers are unknown."""
    names = {shard.name for shard in plan.shards}
    packages = sum(part.bytes for part in disk.parts if part.name in names)
    tables = sum(part.bytes for part in disk.parts if part.name.endswith(".npy"))
    context = plan.recipe.cache.context
    yield MemoryRow(name="packages", bytes=packages, note="compressed, as Core ML loads them")
    yield MemoryRow(name="tables", bytes=tables, note="can be memory-mapped: few pages are in use")
    yield MemoryRow(name="key/value cache", bytes=plan.kv_bytes[context],
                    note=f"{context:,} tokens")  # fmt: skip
