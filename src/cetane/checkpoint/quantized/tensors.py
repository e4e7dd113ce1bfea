"""The tensors of a quantised checkpoint, and what a rule asks of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.checkpoint.dtypes import to_torch
from cetane.checkpoint.stored_tensors import StoredTensor
from cetane.errors import DAMAGED_CHECKPOINT, CetaneError

if TYPE_CHECKING:
    import torch

Tensors = dict[str, StoredTensor]
Decode = Callable[[dict[str, "torch.Tensor"]], "torch.Tensor"]
HINT = (
    "use the model's original weights or a GGUF file, or call `dequantize()` on it with "
    "transformers and save it"
)
FLOATS = {"F64", "F32", "F16", "BF16"}
PARTS = {
    "words": {"I32", "U32"}, "zeros": {"I32", "U32"}, "groups": {"I32", "I64"},
    "zero": {"I8", "I32", "F8_E4M3", *FLOATS}, "indices": {"U8"},
    **dict.fromkeys(("scale", "scales", "biases", "values", "outer", "outer_values"), FLOATS),
}  # fmt: skip
"""The dtypes that a part may have, by its role. Rules check those of other roles."""
ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Endings of scales of inputs, outputs and caches, on which the weights do not depend."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor(StoredTensor):
    """A weight that is stored in several tensors, and read as float32 of `shape`."""

    name: str
    parts: dict[str, StoredTensor]
    decode: Decode
    label: str
    """Its storage, for messages and tables: `int4 (awq)`."""
    sliced: bool = False
    """Whether rows of the weight are decoded from the same rows of its parts."""

    @property
    def stored_as(self) -> str:
        return self.label

    def values(self) -> torch.Tensor:
        """The weight, float32 of `shape`. Raises CetaneError if its parts do not fit each other."""
        parts = {role: to_torch(part) for role, part in self.parts.items()}
        try:
            return self.decode(parts).float().reshape(self.shape)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CetaneError(
                f"{self.file}: {self.name}, {self.label}, does not fit its scales",
                DAMAGED_CHECKPOINT,
            ) from error

    def read(self) -> bytearray:
        return bytearray(self.values().contiguous().numpy().data.cast("B"))

    def rows(self, start: int, stop: int) -> StoredTensor:
        row = self.nbytes // max(1, self.shape[0])
        shape, nbytes = (stop - start, *self.shape[1:]), (stop - start) * row
        if self.sliced:
            parts = {role: part.rows(start, stop) for role, part in self.parts.items()}
            return replace(self, shape=shape, nbytes=nbytes, parts=parts)

        def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.decode(parts)[start:stop].clone()

        return replace(self, shape=shape, nbytes=nbytes, decode=decode)


def refusal(path: Path, method: str, why: str) -> CetaneError:
    """The error for a quantisation that cetane cannot read; `path` is the config.json."""
    return CetaneError(f"{path.parent}: its weights are quantised ({method}): {why}", HINT)


def is_all(size: object, inputs: int) -> bool:
    """Whether a group of a stated size holds all inputs of a row."""
    return type(size) is int and (size == -1 or size >= inputs)


class QuantizedTensors:
    """The tensors of a quantised checkpoint, and the quantisation in its config."""

    def __init__(self, method: str, path: Path, said: dict[str, Any], tensors: Tensors) -> None:
        self.method, self.path, self.said = method, path, said
        self.tensors = {n: t for n, t in tensors.items() if not n.endswith(ACTIVATIONS)}

    def bad(self, why: str) -> CetaneError:
        return refusal(self.path, self.method, why)

    def check(self, holds: bool, what: str) -> None:
        """Raise CetaneError unless something that the format asks of `what` holds."""
        if not holds:
            raise self.bad(f"{what} does not fit the format")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.said.get(key, default)
        if type(value) is not int or not -1 <= value <= 2**20:
            raise self.bad(f"{key} = {value!r}")
        return value

    def layout(self, default: str, *keys: str) -> str:
        """The layout of the tensors, in lower case. Tools name it under different keys, which may
        not contradict each other."""
        said = {key: self.said[key] for key in keys if self.said.get(key) is not None}
        names = {str(name).lower() for name in said.values()} or {default}
        if len(names) > 1:
            told = " and ".join(f"{key} = {name!r}" for key, name in said.items())
            raise self.bad(f"{told} contradict each other")
        return names.pop()

    def check_groups(self, name: str, inputs: int, groups: int, sizes: Collection[object]) -> None:
        """Raise CetaneError unless the inputs of a row, in so many groups, are of one of the sizes
        that the config states, if it states any. -1 stands for all inputs, None for no size."""
        size, stated = inputs // groups, [each for each in sizes if each is not None]
        fits = size in stated or (size == inputs and any(is_all(each, inputs) for each in stated))
        if stated and not fits:
            told = " or ".join(map(repr, stated))
            raise self.bad(f"{name} has groups of {size} inputs, but group_size is {told}")

    def modules(self, end: str, dtypes: tuple[str, ...] = ()) -> list[str]:
        """The modules that have a tensor with this ending, such as `.weight`, of these dtypes."""
        return [
            name.removesuffix(end)
            for name, tensor in self.tensors.items()
            if name.endswith(end) and (not dtypes or tensor.dtype in dtypes)
        ]

    def take(self, name: str, optional: bool = False) -> StoredTensor | None:
        """Remove a tensor, and return it. CetaneError if it is missing, unless `optional`."""
        tensor = self.tensors.pop(name, None)
        if tensor is None and not optional:
            raise self.bad(f"{name} is missing")
        return tensor

    def join(
        self,
        module: str,
        shape: tuple[int, ...],
        label: str,
        decode: Decode,
        end: str = ".weight",
        sliced: bool = False,
        **names: str,
    ) -> None:
        """Replace the parts of a weight, named by role, by one tensor. A role that ends in `_` may
        be missing. CetaneError for a part of another dtype, and for a weight that is plain too."""
        parts = {}
        for role, name in names.items():
            part = self.take(f"{module}{name}", optional=role.endswith("_"))
            if part is not None:
                kind = role.rstrip("_")
                self.check(part.dtype in PARTS.get(kind, {part.dtype}),
                           f"{module}{name} in {part.dtype}")  # fmt: skip
                parts[kind] = part
        if f"{module}{end}" in self.tensors:
            raise self.bad(f"{module}{end} is there twice, plain and in parts")
        first = next(iter(parts.values()))
        nbytes = 4 * math.prod(shape)
        self.tensors[f"{module}{end}"] = QuantizedTensor(
            first.file,
            first.offset,
            nbytes,
            shape,
            "F32",
            f"{module}{end}",
            parts,
            decode,
            f"{label} ({self.method})",
            sliced,
        )

    def tensor(self, name: str) -> StoredTensor:
        """A tensor, which stays. CetaneError if it is missing."""
        if name not in self.tensors:
            raise self.bad(f"{name} is missing")
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensor(name).shape

    def matrix(self, name: str) -> tuple[int, int]:
        shape = self.shape(name)
        self.check(len(shape) == 2 and min(shape) > 0, name)
        return shape[0], shape[1]
