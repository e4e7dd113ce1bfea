"""The checkpoint from which a recipe is built: its attention heads in another order, and its
channels turned, if the recipe says so."""

from cetane.checkpoint import Checkpoint, RotatedCheckpoint, streamed_part
from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.families import rotated, with_streaming
from cetane.planner.planner import Planner
from cetane.planner.weights import ModelSource, adapters_of
from cetane.schema.recipe import CacheSection, Recipe


def as_recipe_asks(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint in the form that a recipe asks for.

    With `cache.streaming`, its heads are in another order. With `compression.rotate`, its channels
    are turned. Without both, it is the checkpoint itself. Raises CetaneError for a recipe that does
    not fit, for adapters beside a base, and for a model of which nothing can be turned.
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


def can_rotate(checkpoint: ModelSource, recipe: Recipe) -> bool:
    """Whether anything of the recipe's model can be turned. With adapters beside it, nothing is."""
    if adapters_of(checkpoint):
        return False
    blocks = plain(checkpoint, recipe).authored.layers
    return any(block.spaces() is not None for block in blocks)


def plain(checkpoint: ModelSource, recipe: Recipe) -> Planner:
    """The planner of a recipe without its compression and without heads that stream."""
    # The recipe's other choices for caches may need heads that stream.
    cache = CacheSection(context=recipe.cache.context)
    changes = {"compression": Selection(), "cache": cache}
    return Planner(checkpoint, recipe.model_copy(update=changes))
