"""Layers of which some key/value heads stream: they keep the first tokens and the newest.

A layer with both kinds of heads has two cache groups, each with a mask of its own. The heads that
keep all tokens come first, in queries, keys, values and outputs; the checkpoint has them in that
order (`checkpoint/streamed.py`).
"""

from __future__ import annotations

from dataclasses import replace

from cetane.checkpoint import Checkpoint, HeadOrder, SeenByHeads, StreamedCheckpoint
from cetane.errors import CetaneError
from cetane.families.attention import Attention
from cetane.families.base import Block
from cetane.families.kinds import LayerKind
from cetane.families.model import CacheGroup, Model
from cetane.schema.interface import Mask
from cetane.schema.streaming import Streaming

KEY = "cache.streaming"


def streaming_layers(model: Model) -> dict[int, int]:
    """The key/value heads of every layer that can stream: it attends to all tokens, and no other
    layer reads its keys."""
    return {number: one.heads.kv for number, (_, one) in attentions(model).items()}


def attentions(model: Model) -> dict[int, tuple[Block, Attention]]:
    """The block and the attention of every layer that can stream, by its number.

    Raises CetaneError for a model whose scores are not plain.
    """
    found = {
        block.layer: (block, part)
        for block in model.layers
        for part in block.modules()
        if isinstance(part, Attention) and part.owns and part.kind.window is None
    }
    for number, (_, attention) in found.items():
        if reason := attention.unstreamed:
            raise CetaneError(f"attention heads of layer {number} cannot stream: {reason}")
    return found


def chosen(model: Model, streaming: Streaming) -> dict[int, tuple[int, ...]]:
    """The heads of every layer that keep all tokens. CetaneError if the scores are another
    model's."""
    here = streaming_layers(model)
    scored = {layer: len(row) for layer, row in enumerate(streaming.scores.layers) if row}
    if scored != here:
        raise CetaneError(
            f"{KEY}.scores: they are of {sum(scored.values())} heads in {len(scored)} layers, but "
            f"{sum(here.values())} heads in {len(here)} layers of this model can stream",
            "cetane heads MODEL makes a file for it",
        )
    return streaming.kept()


def streamed(model: Model, streaming: Streaming) -> Model:
    """The model with heads that stream. Changes the blocks in place.

    Raises CetaneError for scores of another model, and for a model whose heads cannot stream.
    """
    found, host, memory = attentions(model), dict(model.host), dict(model.memory)
    for number, full in chosen(model, streaming).items():
        block, attention = found[number]
        kinds = parts(attention.kind, len(full), streaming)
        before = attention.reads, attention.keeps
        attention.attend_by(kinds)
        block.reads = exchanged(block.reads, before[0], attention.reads)
        block.keeps = exchanged(block.keeps, before[1], attention.keeps)
        for kind in kinds:
            host |= kind.host()
            memory[kind.name] = kind.group()
    read = {name for block in model.layers for name in block.reads}
    kept = {name for block in model.layers for name in block.keeps}
    return replace(
        model,
        host={n: s for n, s in host.items() if not isinstance(s, Mask) or n in read},
        memory={n: m for n, m in memory.items() if not isinstance(m, CacheGroup) or n in kept},
    )


def parts(kind: LayerKind, full: int, streaming: Streaming) -> tuple[LayerKind, ...]:
    """The kinds of a layer's heads, of which the first `full` keep all tokens."""
    group, rest = kind.heads.query // kind.heads.kv, kind.heads.kv - full
    if not rest:
        return (kind,)
    near = replace(
        kind,
        heads=replace(kind.heads, query=group * rest, kv=rest),
        name=f"{kind.name}_near_{rest}",
        window=streaming.window,
        sinks=streaming.sinks,
    )
    if not full:
        return (near,)
    heads = replace(kind.heads, query=group * full, kv=full)
    return replace(kind, heads=heads, name=f"{kind.name}_{full}"), near


def exchanged(
    names: tuple[str, ...], before: tuple[str, ...], after: tuple[str, ...]
) -> tuple[str, ...]:
    """`names` without those in `before`, then those in `after`."""
    return (*(name for name in names if name not in before), *after)


def with_streaming(checkpoint: Checkpoint, model: Model, streaming: Streaming) -> Checkpoint:
    """A checkpoint with its heads in the order that `streamed` expects; `model` is its plain
    model."""
    found, orders = attentions(model), dict[str, HeadOrder]()
    seen = SeenByHeads(chosen(model, streaming), streaming.sinks, streaming.window)
    for number, full in seen.full.items():
        block, attention = found[number]
        order = [*full, *(head for head in range(attention.heads.kv) if head not in full)]
        if order != sorted(order):
            put_in_order(block, attention, order, orders)
    return StreamedCheckpoint(checkpoint, seen, orders)


def put_in_order(
    block: Block, attention: Attention, order: list[int], orders: dict[str, HeadOrder]
) -> None:
    """Add the order of a layer's key/value heads to the orders of its tensors. Several parameters
    may be rows of one tensor."""
    weights = dict(block.weights())
    prefix = next(path for path, module in block.named_modules() if module is attention)
    for path, axis in attention.headed():
        weight = weights.get(f"{prefix}.{path}")
        if weight is None:  # such as a bias that this family lacks
            continue
        first, last = weight.rows or (0, weight.stored[axis])
        size = (last - first) // len(order)  # of a key/value head, or of its query heads
        moved = [first + head * size + at for head in order for at in range(size)]
        whole = list(orders.get(weight.name, (axis, range(weight.stored[axis])))[1])
        whole[first:last] = moved
        orders[weight.name] = axis, tuple(whole)
