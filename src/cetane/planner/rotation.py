"""The checkpoint from which a recipe is built: its channels turned if the recipe says so."""

from cetane.checkpoint import Checkpoint, RotatedCheckpoint
from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.families import rotated
from cetane.planner.planner import Planner
from cetane.planner.weights import ModelSource, adapters_of
from cetane.schema.recipe import Recipe


def turned(checkpoint: Checkpoint, recipe: Recipe) -> Checkpoint:
    """The checkpoint, or with `compression.rotate` what its model's rotation makes of it.

    Raises CetaneError for a recipe that does not fit, and a model of which nothing can be turned.
    """
    if not recipe.compression.rotate or isinstance(checkpoint, RotatedCheckpoint):
        return checkpoint
    if checkpoint.adapters:
        raise CetaneError(
            "compression.rotate: adapters beside a base cannot be turned",
            "set compression.rotate = false, or merge one with --lora FOLDER",
        )
    return rotated(checkpoint, unturned(checkpoint, recipe).authored)


def can_turn(checkpoint: ModelSource, recipe: Recipe) -> bool:
    """Whether anything of the recipe's model can be turned; nothing beside adapters is."""
    if adapters_of(checkpoint):
        return False
    blocks = unturned(checkpoint, recipe).authored.layers
    return any(block.spaces() is not None for block in blocks)


def unturned(checkpoint: ModelSource, recipe: Recipe) -> Planner:
    """The planner of a recipe that compresses nothing."""
    return Planner(checkpoint, recipe.model_copy(update={"compression": Selection()}))
