"""MIL's lists of tensors. A write makes a new list; the old list keeps its elements."""

import torch
from torch import Tensor

from cetane.mil.ops.registry import TensorList, Tensors, op
from cetane.mil.shapes import bounded
from cetane.mil.storage import STORAGE

MOST_LIST = 1 << 16
"""The most elements of a list."""


@op("make_list", ignores=("dynamic_length",))
def make_list(
    elem_shape: Tensors | None = None, init_length: int = 1, dtype: str = "fp32"
) -> TensorList:
    """Elements are zeros until written. A size may be a name: then only a write tells the shape."""
    sizes = elem_shape or []
    empty = None
    check_index(init_length)
    if not any(isinstance(size, str) for size in sizes):
        bounded([int(size) for size in sizes])
        empty = torch.zeros([int(size) for size in sizes], dtype=STORAGE[dtype])
    return TensorList((None,) * init_length, empty)


@op("list_length")
def list_length(ls: TensorList) -> Tensor:
    return torch.tensor(len(ls.elements), dtype=torch.int32)


@op("list_write")
def list_write(ls: TensorList, index: int, value: Tensor) -> TensorList:
    return _written(ls, {index: value})


@op("list_scatter")
def list_scatter(ls: TensorList, indices: list[int], value: Tensor) -> TensorList:
    return _written(ls, dict(zip(indices, value, strict=True)))


@op("list_read")
def list_read(ls: TensorList, index: int) -> Tensor:
    return ls.read(index)


@op("list_gather")
def list_gather(ls: TensorList, indices: list[int]) -> Tensor:
    elements = [ls.read(index) for index in indices]  # an element may be read often
    bounded([len(elements), *(elements[0].shape if elements else ())])
    return torch.stack(elements)


def check_index(index: int) -> None:
    """Raise ValueError for an index that no list has."""
    if not 0 <= index <= MOST_LIST:
        raise ValueError(f"a list has no index {index}")


def _written(ls: TensorList, values: dict[int, Tensor]) -> TensorList:
    """The list with new elements. A write beyond the end makes the list longer.

    Raises ValueError if all elements together are too large for one value: a loop may write many.
    """
    for index in values:
        check_index(index)
    elements = dict(enumerate(ls.elements)) | values
    bounded([sum(element.numel() for element in elements.values() if element is not None)])
    empty = ls.empty
    if empty is None and values:
        empty = torch.zeros_like(next(iter(values.values())))
    return TensorList(tuple(elements.get(i) for i in range(max(elements, default=-1) + 1)), empty)
