"""Which tensors of a model turn together, by what its blocks say (`Block.spaces`)."""

from dataclasses import dataclass, replace
from typing import Any

from cetane.checkpoint import Checkpoint, Fold, RotatedCheckpoint, Rotation
from cetane.errors import CetaneError
from cetane.families.base import Block, Weight
from cetane.families.model import Model

HEAD = "lm_head.weight"


@dataclass(frozen=True)
class _Folds:
    """The folds of a model's tensors, as blocks add to them."""

    made: dict[str, Fold]

    def add(self, weight: Weight, **changes: Any) -> None:
        self.made[weight.name] = replace(self.made.get(weight.name, Fold()), **changes)


def rotated(checkpoint: Checkpoint, model: Model) -> RotatedCheckpoint:
    """A checkpoint with the channels of `model` turned: of its residual stream where every block
    says how, and of the values of its attention heads.

    Raises CetaneError for a model of which nothing can be turned.
    """
    blocks = [block for block in model.layers if block.spaces() is not None]
    folds, copies = _Folds({}), dict[str, str]()
    stream = None
    if len(blocks) == len(model.layers) and all(whole(block) for block in blocks):
        stream = Rotation(model.hidden)
        for block in blocks:
            turn_stream(block, stream, folds)
        turn_ends(model, stream, folds, copies)
    for block in blocks:
        turn_heads(block, folds)
    if not folds.made:
        raise CetaneError(
            f"compression.rotate: nothing of a {checkpoint.config['model_type']} can be turned",
            "leave the rotation out",
        )
    return RotatedCheckpoint(checkpoint, folds.made, copies, stream)


def whole(block: Block) -> bool:
    """Whether a block says who writes to the residual stream and who reads from it."""
    spaces = block.spaces()
    return spaces is not None and bool(spaces.writers)


def turn_stream(block: Block, rotation: Rotation, folds: _Folds) -> None:
    """Turn the residual stream in one block. Norms lose their gains to those that read them."""
    spaces, weights = block.spaces(), dict(block.weights())
    assert spaces is not None
    for writer in spaces.writers:
        folds.add(weights[f"{writer}.weight"], rows=rotation)
        if f"{writer}.bias" in weights:
            folds.add(weights[f"{writer}.bias"], columns=rotation)
    for norm, readers in spaces.readers.items():
        gain = weights[f"{norm}.weight"]
        folds.add(gain, ones=True)
        for reader in readers:
            folds.add(weights[f"{reader}.weight"], gain=gain.name, columns=rotation)


def turn_ends(model: Model, rotation: Rotation, folds: _Folds, copies: dict[str, str]) -> None:
    """Turn the embedding and the head; a tied head becomes a tensor of its own."""
    table = model.embedding.weight
    if model.output == table:
        copies[HEAD] = table
    folds.made[HEAD if model.output == table else model.output] = Fold(model.norm, rotation)
    folds.made[table] = Fold(columns=rotation)
    folds.made[model.norm] = Fold(ones=True)


def turn_heads(block: Block, folds: _Folds) -> None:
    """Turn the values of a block's attention heads."""
    spaces, weights = block.spaces(), dict(block.weights())
    if spaces is None or spaces.values is None:
        return
    maker, reader, width = spaces.values
    value = weights[f"{maker}.weight"]
    if value.rows is not None or value.pick is not None:  # the tensor holds more than values
        return
    folds.add(value, rows=Rotation(width))
    if f"{maker}.bias" in weights:
        folds.add(weights[f"{maker}.bias"], columns=Rotation(width))
    folds.add(weights[f"{reader}.weight"], columns=Rotation(width))
