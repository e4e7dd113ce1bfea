"""Products of bfloat16, where a device has quick ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cetane.fitting.seats import is_linear


def bfloat16_products(model: Any) -> AbstractContextManager[Any]:
    """A context with bfloat16 products, if the device has them. Teacher and student both use it."""
    kind = model.device.type
    return torch.autocast(kind, torch.bfloat16, enabled=has_bfloat16(kind))


def has_bfloat16(kind: str) -> bool:
    """Whether products of bfloat16 are quicker than those of fp32 on a kind of device. With AMX
    they take a sixth of the time."""
    return kind != "cpu" or bool(torch.cpu._is_avx512_bf16_supported())


@contextmanager
def narrowed(model: Any) -> Iterator[None]:
    """A context of `bfloat16_products` in which linear layers hold bfloat16 too: else each call
    would convert them."""
    kept: list[tuple[nn.Parameter, Tensor]] = []
    if has_bfloat16(model.device.type):
        for module in model.modules():
            if is_linear(module):
                kept += [(own, own.data) for own in module.parameters(recurse=False)]
    for parameter, values in kept:
        parameter.data = values.bfloat16()
    try:
        with bfloat16_products(model):
            yield
    finally:
        for parameter, values in kept:
            parameter.data = values
