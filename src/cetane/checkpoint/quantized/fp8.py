"""Floats of 8 bits, as transformers' finegrained_fp8 stores them."""

from __future__ import annotations

from cetane.checkpoint.quantized.scales import is_pair, scaled
from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors


def read_fp8(stored: QuantizedTensors) -> Tensors:
    """float8_e4m3 with a scale for each block of 128 by 128, or for the tensor: DeepSeek, Qwen."""
    block = stored.said.get("weight_block_size") or [128, 128]
    stored.check(is_pair(block), "weight_block_size")
    for module in stored.modules(".weight", ("F8_E4M3", "F8_E5M2")):
        rows, columns = stored.matrix(f"{module}.weight")
        end = "_scale_inv" if f"{module}.weight_scale_inv" in stored.tensors else "_scale"
        scale = stored.shape(f"{module}.weight{end}")
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        stored.check(scale in ((), (1,), (rows, 1), blocks), f"{module}.weight{end}")
        size = tuple(block) if scale == blocks else None
        stored.join(
            module, (rows, columns), "float8", scaled(size), weight=".weight",
            scale=f".weight{end}",
        )  # fmt: skip
    return stored.tensors
