"""Decoding of compressed constants, by `decode`."""

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cetane.mil.decode import DECODERS
from cetane.mil.ops.registry import OPS


def _on_tensors(decode: Callable[..., Any]) -> Callable[..., Any]:
    """A decoder of tensors, from a decoder of arrays."""

    @wraps(decode)
    def call(**arguments: Any) -> Any:
        arrays = {n: a.numpy() if isinstance(a, Tensor) else a for n, a in arguments.items()}
        result = decode(**arrays)
        if isinstance(result, tuple):
            return tuple(map(torch.from_numpy, result))
        return torch.from_numpy(result)

    return call


for _kind, _decoder in DECODERS.items():
    OPS[_kind] = replace(_decoder, call=_on_tensors(_decoder.call))
