"""Facts for an app's developer: files, the steps of a call, every function's tensors, memory."""

from collections.abc import Collection, Iterator

from cetane.bundle import Bundle
from cetane.export.contract import MemoryFigures, means, memory_figures
from cetane.mil import Program
from cetane.report.content.developers import (
    CallOrder,
    CallSignature,
    FileRow,
    ForDevelopers,
    MemoryRow,
    TensorRow,
)
from cetane.report.content.figures import DiskUse
from cetane.schema.function import Function, Route, Step
from cetane.schema.interface import Input, Output
from cetane.schema.manifest import MANIFEST, TOKENIZER
from cetane.schema.plan import Plan


def for_developers(bundle: Bundle, programs: Collection[Program], disk: DiskUse) -> ForDevelopers:
    """The facts of a bundle that an app needs."""
    plan, context = bundle.plan, bundle.plan.recipe.cache.context
    memory = tuple(memory_rows(memory_figures(bundle, programs), context))
    return ForDevelopers(
        context=context,
        deployment=plan.recipe.target.deployment,
        files=tuple(file_rows(bundle, disk)),
        calls=tuple(
            CallOrder(mode=mode, tokens=steps.tokens, calls=tuple(map(step_text, steps.steps)))
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


def step_text(step: Step | Route) -> str:
    """A step of a call, in words."""
    if isinstance(step, Step):
        return f"{step.shard} · {step.function}"
    return f"{step.shard} · one of {len(step.experts)} experts, chosen by {step.scores}"


def interfaces(plan: Plan) -> Iterator[CallSignature]:
    """The functions of all shards; functions with equal tensors are grouped."""
    groups: dict[tuple[int, tuple[TensorRow, ...]], list[tuple[str, str]]] = {}
    for (shard, name), function in plan.functions.items():
        tensors = tuple(tensor_rows(plan, function, shard))
        groups.setdefault((function.tokens, tensors), []).append((shard, name))
    for (tokens, tensors), owners in groups.items():
        yield CallSignature(
            shards=tuple(dict.fromkeys(shard for shard, _ in owners)),
            functions=tuple(dict.fromkeys(name for _, name in owners)),
            tokens=tokens,
            tensors=tensors,
        )


def tensor_rows(plan: Plan, function: Function, shard: str) -> Iterator[TensorRow]:
    """A function's inputs, outputs and states. Names of the shard's own buffers lose its name, so
    that shards alike have rows alike."""
    ports: tuple[Input | Output, ...] = (*function.inputs, *function.outputs)
    for port in ports:
        yield TensorRow(
            direction="input" if isinstance(port, Input) else "output",
            name=port.name,
            dtype=port.dtype,
            shape=port.shape,
            role=means(plan, port).replace(f" {shard}.", " "),
        )
    for state in function.states:
        yield TensorRow(direction="state", name=state.name, dtype=state.dtype,
                        shape=state.shape, role="an MLState: Core ML keeps it")  # fmt: skip


def memory_rows(memory: MemoryFigures, context: int) -> Iterator[MemoryRow]:
    """The memory of a running app, by what holds it."""
    rows = (
        ("packages", sum(memory.packages.values()), "compressed, as Core ML loads them"),
        ("tables", memory.tables, "can be memory-mapped: few pages are in use"),
        ("buffers", memory.caches, f"the app keeps them, for {context:,} tokens"),
        ("buffers after a call", memory.caches, "a call may take one and give another"),
        ("states", memory.states, "Core ML keeps them"),
        ("largest call", memory.call, "inputs and outputs, without buffers"),
        ("intermediate values", memory.activations, "less if Core ML fuses ops"),
    )
    yield from (MemoryRow(name=name, bytes=size, note=note) for name, size, note in rows if size)
