"""Tensors of Hugging Face's that a GGUF file has as numbers, or several in one tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cetane.checkpoint.gguf.file import GGUFFile
from cetane.checkpoint.gguf.keys import Keys
from cetane.checkpoint.gguf.rules import Array, MadeTensor, Shape
from cetane.checkpoint.stored_tensors import StoredTensor
from cetane.errors import CetaneError


@dataclass(frozen=True)
class LayerNumber:
    """A number of each layer in the metadata, which is a tensor to Hugging Face."""

    key: str
    """The whole key of the metadata."""
    name: str
    """Hugging Face's name in a layer."""
    shape: Shape

    def tensors(self, file: GGUFFile, layers: int) -> list[StoredTensor]:
        """The tensor of every layer. CetaneError without a number for each."""
        numbers = Keys(file).numbers(self.key, layers)
        return [_made(file, number, self.shape) for number in numbers]


def _made(file: GGUFFile, number: float, shape: Shape) -> MadeTensor:
    def make() -> Array:
        return np.full(shape, number, np.float32)

    return MadeTensor(file.path, 0, 4, shape, "F32", (), make, False)


def apart(
    tensors: Mapping[str, StoredTensor], stacks: Iterable[str], where: str
) -> dict[str, StoredTensor]:
    """The tensors, with those of `stacks` cut along axis 0: each piece has its number at the end of
    its name."""
    result = dict(tensors)
    for name in stacks:
        stack = result.pop(name, None)
        if stack is None:
            raise CetaneError(f"{where} lacks tensor {name!r}", "convert or download it again")
        if len(stack.shape) != 3:
            raise CetaneError(f"{where}: tensor {name!r} has shape {stack.shape}, not matrices")
        for index in range(stack.shape[0]):
            piece = stack.rows(index, index + 1)
            result[f"{name}.{index}"] = replace(piece, shape=stack.shape[1:])
    return result
