"""The dtypes of safetensors, and stored tensors of them as torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.stored_tensors import StoredTensor
from cetane.errors import CetaneError

if TYPE_CHECKING:
    import torch

BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
"""The bits of an element of each of safetensors' dtypes (its `Dtype`)."""
READ = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U32": "uint32",
    "U8": "uint8",
    "BOOL": "bool",
}
"""torch's names of the dtypes that are read. A file may hold others in tensors that no model
needs."""


def to_torch(stored: StoredTensor) -> torch.Tensor:
    """The tensor in its stored dtype, in memory of its own. CetaneError for a dtype that is not
    read."""
    import torch  # here, so that opening a checkpoint does not load it

    if stored.dtype not in READ:
        raise CetaneError(
            f"{stored.file}: a tensor of {stored.dtype} is not supported",
            "load the model with transformers in bfloat16, and save it",
        )
    dtype = getattr(torch, READ[stored.dtype])
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=dtype)
    return torch.frombuffer(stored.read(), dtype=dtype).reshape(stored.shape)
