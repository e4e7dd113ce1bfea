"""The layouts of bitsandbytes: the `state_dict` of Linear8bitLt and Params4bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cetane.checkpoint.quantized.packed import from_fours
from cetane.checkpoint.quantized.tensors import FLOATS, QuantizedTensors, Tensors
from cetane.validation import parse_json

if TYPE_CHECKING:
    import torch


def read_bitsandbytes(stored: QuantizedTensors) -> Tensors:
    """int8 rows, or blocks of 4-bit indices, each with its largest magnitude."""

    def rows(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return parts["weight"].float() * (parts["largest"].float() / 127)[:, None]

    for module in stored.modules(".SCB"):
        shape = stored.matrix(f"{module}.weight")
        stored.check(
            stored.shape(f"{module}.SCB") == (shape[0],)
            and stored.tensors[f"{module}.SCB"].dtype in FLOATS, f"{module}.SCB",
        )  # fmt: skip
        stored.check(stored.tensors[f"{module}.weight"].dtype == "I8", f"{module}.weight")
        stored.take(f"{module}.weight_format", optional=True)
        stored.join(module, shape, "int8", rows, weight=".weight", largest=".SCB")
    for kind in ("nf4", "fp4"):
        end = f".weight.quant_state.bitsandbytes__{kind}"
        for module in stored.modules(end):
            fours(stored, module, kind, end)
    return stored.tensors


def fours(stored: QuantizedTensors, module: str, kind: str, end: str) -> None:
    """Join a 4-bit weight of bitsandbytes, whose state is JSON in a tensor."""
    described = stored.take(f"{module}{end}")
    assert described is not None
    stored.check(described.nbytes <= 4096, f"{module}{end}")
    state = parse_json(described.read(), f"{stored.path.parent}: {module}{end}")
    stored.check(isinstance(state, dict), f"{module}{end}")
    block, shape = state.get("blocksize"), state.get("shape")
    stored.check(
        type(block) is int and block > 0 and isinstance(shape, list) and len(shape) == 2
        and all(type(n) is int and 0 < n <= 2**31 for n in shape), f"{module}{end}",
    )  # fmt: skip
    count = math.prod(shape)
    fits = stored.tensor(f"{module}.weight").nbytes == -(-count // 2)
    stored.check(fits and stored.shape(f"{module}.weight.quant_map") == (16,), f"{module}.weight")
    blocks = -(-count // block)
    nested, offset = state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    kinds = FLOATS if nested is None else {"U8"}
    fits = stored.shape(f"{module}.weight.absmax") == (blocks,)
    stored.check(fits and stored.tensors[f"{module}.weight.absmax"].dtype in kinds,
                 f"{module}.weight.absmax")  # fmt: skip
    if nested is not None:
        # The largest fp32; NaN compares as false.
        finite = type(offset) in (int, float) and abs(offset) < 2.0**128
        stored.check(type(nested) is int and nested > 0 and finite
                     and stored.shape(f"{module}.weight.nested_quant_map") == (256,)
                     and stored.shape(f"{module}.weight.nested_absmax") == (-(-blocks // nested),),
                     f"{module}{end}")  # fmt: skip

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        largest = parts["largest"]
        if nested is not None:
            outer = parts["outer"].repeat_interleave(min(nested, blocks))[:blocks]
            largest = parts["outer_values"][largest.long()] * outer + offset
        values = parts["values"][from_fours(parts["indices"])[:count]]
        spread = largest.float().repeat_interleave(min(block, count))[:count]
        return (values * spread).reshape(shape)

    stored.join(
        module, tuple(shape), kind, decode, indices=".weight", values=".weight.quant_map",
        largest=".weight.absmax", outer_=".weight.nested_absmax",
        outer_values_=".weight.nested_quant_map",
    )  # fmt: skip
