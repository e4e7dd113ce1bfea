"""The checkpoint from which a recipe is built: its attention heads in another order, and its
channels turned, if the recipe says so."""

from cetane.checkpoint import Checkpoint, RotatedCheckpoint, streamed_part
from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.families import rotated, with_streaming
from cetane.planner.planner import Planner
from cetane.planner.weights import ModelSource, adapters_of
from cetane.schema.recipe import CacheTable, Recipe


def turned(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint, or with `cache.streaming` and `compression.rotate` what the order of its
    heads and its model's rotation make of it.

    Raises CetaneError for a recipe that does not fit, and a model of which nothing can be turned.
    """
    streaming = recipe.cache.streaming
    if streaming is not None and streamed_part(checkpoint) is None:
        if checkpoint.adapters:
            raise CetaneError(
                "cache.streaming: adapters beside a base keep the order of its heads",
                "leave cache.streaming out, or merge one with --lora FOLDER",
            )
        checkpoint = with_streaming(checkpoint, plain(checkpoint, recipe).authored, streaming)
    if not recipe.compression.rotate or isinstance(checkpoint, RotatedCheckpoint):
        return checkpoint
    if checkpoint.adapters:
        raise CetaneError(
            "compression.rotate: adapters beside a base cannot be turned",
            "set compression.rotate = false, or merge one with --lora FOLDER",
        )
    return rotated(checkpoint, plain(checkpoint, recipe).authored)


def can_turn(checkpoint: ModelSource, recipe: Recipe) -> bool:
    """Whether anything of the recipe's model can be turned; nothing beside adapters is."""
    if adapters_of(checkpoint):
        return False
    blocks = plain(checkpoint, recipe).authored.layers
    return any(block.spaces() is not None for block in blocks)


def plain(checkpoint: ModelSource, recipe: Recipe) -> Planner:
    """The planner of a recipe that compresses nothing, and of which no head streams."""
    cache = CacheTable(context=recipe.cache.context)  # other choices may be for heads that stream
    changes = {"compression": Selection(), "cache": cache}
    return Planner(checkpoint, recipe.model_copy(update=changes))
