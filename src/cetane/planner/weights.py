"""A plan's weights: their formats and bytes, and checks that the checkpoint has them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from cetane.checkpoint import RotatedCheckpoint
from cetane.checkpoint.lora import Lora
from cetane.checkpoint.safetensors import EMBEDDING, HEAD
from cetane.compress import Format, Fp16, Selection, parse_format
from cetane.compress.selection import NEXT, SMALLEST
from cetane.errors import CetaneError
from cetane.families import Block, Model, Weight, Weights, largest_of
from cetane.schema.interface import Shape

OF_ONE_MODEL = (
    "give a checkpoint whose weights and config.json are of one model, or download it again"
)
"""The hint for weights that a config does not describe."""


class ModelSource(Weights, Protocol):
    """The part of a checkpoint that a plan reads: its config, and its tensors' names and shapes."""

    @property
    def source(self) -> str: ...
    @property
    def config(self) -> dict[str, Any]: ...
    def __contains__(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...


def adapters_of(checkpoint: ModelSource) -> Mapping[str, Lora]:
    """The adapters beside a checkpoint, by name; a model of shapes alone has none."""
    return getattr(checkpoint, "adapters", {})


def format_of(weight: Weight, compression: Selection) -> Format:
    """The format of a weight. Gains and biases stay in fp16.

    If a port chooses the formats, a weight that the smallest format cannot divide takes the next
    larger one.
    """
    if not weight.kind:
        return Fp16()
    form = compression.format_for(weight.name, weight.kind)
    if compression.auto and form.name == SMALLEST and not form.fits(weight.shape):
        return parse_format(NEXT)
    return form


def weight_count(blocks: Iterable[Block]) -> int:
    """The number of all weights of these blocks."""
    return sum(weight.elements for block in blocks for _, weight in block.weights())


def weight_bytes(blocks: Iterable[Block], compression: Selection) -> int:
    """Bytes of all weights of these blocks."""
    return sum(
        format_of(weight, compression).nbytes(weight.shape)
        for block in blocks
        for _, weight in block.weights()
    )


def adapter_bytes(blocks: Iterable[Block], adapter: str) -> int:
    """Bytes of all that an adapter adds to these blocks."""
    added = (weight for block in blocks for _, weight in block.adapter_weights(adapter))
    return sum(Fp16().nbytes(weight.shape) for weight in added)


def mean_bits(blocks: Iterable[Block], compression: Selection) -> float:
    """Mean bits per weight, without gains and biases."""
    held = [w for block in blocks for _, w in block.weights() if w.kind]
    bits = sum(w.elements * format_of(w, compression).bits for w in held)
    return bits / sum(w.elements for w in held)


def refuse_damaged(checkpoint: ModelSource, model: Model, blocks: Iterable[Block]) -> None:
    """Raise CetaneError for a weight that holds NaN or infinity.

    All weights are read, as they were before a turn: turned ones hold the NaN of a norm too.
    """
    source = checkpoint.base if isinstance(checkpoint, RotatedCheckpoint) else checkpoint
    tables = (model.embedding, *(table.table for table in model.tables.values()))
    weights = (weight for block in blocks for _, weight in block.weights())
    for name in dict.fromkeys((*(t.weight for t in tables), *(w.name for w in weights))):
        if name in source:  # not a head that is only the turned model's own
            largest_of(name, source.read(name))


def check_layers(checkpoint: ModelSource) -> None:
    """Raise CetaneError if the config has more layers than the checkpoint has tensors.

    This runs before a module is made for each layer.
    """
    layers, tensors = checkpoint.config.get("num_hidden_layers"), len(checkpoint.names())
    if isinstance(layers, int) and layers > tensors:
        raise CetaneError(
            f"{checkpoint.source}: the config says {layers} layers, "
            f"but there are only {tensors} tensors",
            OF_ONE_MODEL,
        )


def check_weights(
    checkpoint: ModelSource, model: Model, blocks: Iterable[Block], compression: Selection
) -> None:
    """Check that every weight is in the checkpoint and fits its format.

    Raises CetaneError if not, and for a rule of the compression that matches no weight.
    """
    kinds: dict[str, str] = {}
    for name, wanted in needed_tensors(model):
        check_shape(checkpoint, name, wanted)
    for block in blocks:
        for _, weight in block.weights():
            check_shape(checkpoint, weight.name, weight.stored)
            if weight.kind:
                kinds[weight.name] = weight.kind
                format_of(weight, compression).check(weight.shape, weight.name)
        for _, weight in block.adapter_weights():
            check_shape(checkpoint, weight.name, weight.stored)
    compression.check(kinds)


def needed_tensors(model: Model) -> Iterator[tuple[str, Shape]]:
    """The tensors of the host's tables, and their shapes."""
    table = model.embedding
    yield table.weight, (model.vocab, model.hidden)
    for name in filter(None, (table.bias, table.scale)):
        yield name, (model.hidden,)
    for other in model.tables.values():
        rows = other.table.first + (other.table.rows or other.rows)
        yield other.table.weight, (rows, other.channels)


def check_shape(checkpoint: ModelSource, name: str, wanted: Shape) -> None:
    """Raise CetaneError if a checkpoint lacks a tensor, or has it in another shape."""
    if name not in checkpoint:
        raise CetaneError(
            f"{checkpoint.source}: no tensor {name}, which the config asks for",
            missing_hint(checkpoint, name) or OF_ONE_MODEL,
        )
    stored = tuple(checkpoint.shape(name))
    if stored != wanted:
        raise CetaneError(
            f"{checkpoint.source}: {name} has shape {stored}, but the config says {wanted}",
            OF_ONE_MODEL,
        )


def missing_hint(checkpoint: ModelSource, name: str) -> str | None:
    """The hint for a tensor that a checkpoint lacks; None if it has no tensor like that."""
    if name == HEAD and EMBEDDING in checkpoint:
        return 'if the head is the embedding, write "tie_word_embeddings": true into config.json'
    ending = f".{name.removeprefix('model.')}"
    found = next((other for other in checkpoint.names() if other.endswith(ending)), None)
    return f"{found} is there: name the tensors as transformers does" if found else None
