"""Writes the folder that Apple's runner loads: an asset, a tokenizer and metadata."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.export.coreai import contract
from cetane.export.coreai.check import check
from cetane.export.coreai.converter import Converter
from cetane.export.coreai.embeddings import Gather, LoadTable, read_table
from cetane.export.coreai.planner import StaticPlanner, planners
from cetane.files import Progress, read_json, replacing, write_json
from cetane.lower.lower import Lowering
from cetane.lower.tracing import labelled_weights

if TYPE_CHECKING:
    from coreai.authoring import AIProgram

COMPILE = "xcrun coreai-build compile {name}.aimodel --platform iOS"
"""The command to run in the folder on a Mac with Xcode 27, for a model that loads at once."""
TYPES = {
    contract.HIDDEN: torch.float16,
    contract.POSITIONS: torch.uint16,
    contract.STEP: torch.int32,
    contract.MASK: torch.float16,
}
"""The dtypes of a call's inputs, by name."""
SHARD = "model"
Verdict = TypeVar("Verdict")


def export(
    bundle: Bundle,
    checkpoint: Checkpoint,
    target: Path,
    judge: Callable[[Path], Verdict],
    progress: Progress,
) -> tuple[list[str], Verdict]:
    """Write the folder to `target`, which must not exist.

    Returns the warnings about its program, and the verdict of `judge`. `judge` gets an asset with
    plain buffers; the shipped one interleaves its buffers for the Neural Engine. The runtime of
    coreai-core 1.0.0b3 on Linux mixes interleaved memory up: runs differ, and some give NaN.
    Raises CetaneError for a model that the contract cannot hold.
    """
    made = planners(checkpoint, bundle.plan.recipe)
    longest = made[-1].recipe.cache.context
    with replacing(target) as folder:
        folder.mkdir(parents=True)
        program = convert(made, checkpoint, progress)
        warnings = check(program)
        with TemporaryDirectory(dir=folder) as scratch:
            plain = Path(scratch) / "plain.aimodel"
            program.save_asset(plain)
            verdict = judge(plain)
        constrain(program, [name for each in made for name in call_names(each)], longest)
        program.save_asset(folder / f"{target.name}.aimodel")
        write_tokenizer(checkpoint.tokenizer, folder / "tokenizer")
        write_json(folder / "metadata.json", metadata(made, checkpoint, target.name))
    return warnings, verdict


def call_names(planner: StaticPlanner) -> list[str]:
    """The names of a context's functions."""
    return [graph.function.name for graph in planner.graphs(SHARD)]


def convert(made: list[StaticPlanner], checkpoint: Checkpoint, progress: Progress) -> "AIProgram":
    """The program of all contexts and widths, and of the embedding."""
    longest = made[-1]
    converter = Converter(Lowering(longest, checkpoint).constants(SHARD))
    steps = sum(len(call_names(planner)) for planner in made) + 2
    progress("embedding", 0, steps)
    add_embedding(converter, longest, checkpoint)
    done = 1
    for planner in made:
        for name in add_calls(converter, planner, longest.recipe.cache.context):
            progress(name, done, steps)
            done += 1
    progress("program", done, steps)
    return converter.program()


def add_embedding(converter: Converter, planner: StaticPlanner, checkpoint: Checkpoint) -> None:
    """Add `load_embeddings`, and `gather_embeddings` of every width."""
    sizes = planner.sizes
    quantized = planner.recipe.embedding.rows == "int8"
    table, steps = read_table(
        planner.model.embedding, checkpoint, sizes.vocabulary, sizes.hidden, quantized
    )
    converter.add(contract.LOAD, LoadTable(table), (), (), (contract.TABLE,))
    for width in contract.WIDTHS[contract.EXTEND]:
        tokens = torch.zeros((1, width), dtype=torch.int32)
        converter.add(
            contract.gather_name(width),
            Gather(steps),
            (tokens, table),
            (contract.TOKENS, contract.TABLE),
            (contract.ROWS,),
        )


def add_calls(converter: Converter, planner: StaticPlanner, positions: int) -> Iterator[str]:
    """Add `extend` and `prompt_opt` of every width; gives each name before it is added."""
    context = planner.recipe.cache.context
    for graph in planner.graphs(SHARD):
        yield graph.function.name
        shapes = planner.sizes.inputs(context, graph.function.tokens)
        states = torch.zeros((2, *planner.sizes.states(context)), dtype=torch.float16)
        converter.add(
            graph.function.name,
            planner.wrapped(graph, positions),
            [*(torch.zeros(shape, dtype=TYPES[name]) for name, shape in shapes.items()),
             *(state.clone() for state in states)],
            tuple(shapes),
            (contract.LOGITS,),
            (contract.KEYS, contract.VALUES),
            labelled_weights(planner, SHARD, graph),
        )  # fmt: skip


def constrain(program: "AIProgram", calls: list[str], longest: int) -> None:
    """Fix the layout of the buffers that the host shares between functions.

    Rows of caches are equally far apart in all functions, so all can use the buffers of the longest
    context.
    """
    from coreai.authoring.types import AllocationType, HardwareConstraints

    row = contract.INTERLEAVE * longest
    cache = HardwareConstraints(
        AllocationType.IOSurface,
        interleave=(1, 1, contract.INTERLEAVE, 1, 1),
        alignments=(1, 1, 1, 1, row, 1),
    )
    table = HardwareConstraints(
        AllocationType.IOSurface,
        interleave=(contract.ROW_INTERLEAVE, 1, 1),
        alignments=(1, 1, 1, 1),
    )
    for name in calls:
        program.set_hardware_constraints(name, {contract.KEYS: cache, contract.VALUES: cache})
    gathers = map(contract.gather_name, contract.WIDTHS[contract.EXTEND])
    for name in (contract.LOAD, *gathers):
        program.set_hardware_constraints(name, {contract.TABLE: table})


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer's files. Apple's runner stops at the end token and at all additional
    special tokens (`LanguageConfig.swift`); it does not read `generation_config.json`."""
    tokenizer.save(folder)
    path = folder / "tokenizer_config.json"
    texts = {token: text for text, token in tokenizer.backend.get_vocab().items()}
    # A config may name tokens that the tokenizer lacks.
    stops = [texts[token] for token in tokenizer.eos_ids if token in texts]
    write_json(path, read_json(path) | {"additional_special_tokens": stops})


def metadata(made: list[StaticPlanner], checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """metadata.json, version 0.2."""
    planner = made[-1]
    calls = [name for each in made for name in call_names(each)]
    return {
        "metadata_version": "0.2",
        "kind": "llm",
        "name": name,
        "assets": {"main": f"{name}.aimodel"},
        "language": {
            "tokenizer": checkpoint.model_name,
            "vocab_size": planner.sizes.vocabulary,
            "max_context_length": planner.recipe.cache.context,
            "embedded_tokenizer": True,
            "eos_token_ids": list(checkpoint.tokenizer.eos_ids),
            "function_map": {
                contract.LOAD: [contract.LOAD],
                contract.GATHER: [
                    contract.gather_name(width) for width in contract.WIDTHS[contract.EXTEND]
                ],
                **{
                    kind: [call for call in calls if call.startswith(kind)]
                    for kind in (contract.EXTEND, contract.PROMPT)
                },
            },
        },
        "source": {"model_definition": "cetane", "hf_model_id": checkpoint.model_name},
        "compression": planner.recipe.compression.default,
        "compilation": {"date": datetime.now(UTC).isoformat(), "targets": []},
    }
