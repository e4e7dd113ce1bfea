"""OCP's Microscaling Formats 1.0 as gpt-oss stores them, which transformers' integrations/mxfp4.py
reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a 4-bit float; the highest bit is the sign."""


def read_mxfp4(stored: QuantizedTensors) -> Tensors:
    """gpt-oss: 4-bit floats, the low half of a byte first. A block of 32 has a power of two, stored
    plus 127. transformers keeps these matrices transposed."""

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        import torch

        values = torch.tensor([*E2M1, *(-value for value in E2M1)])
        blocks, powers = parts["blocks"].int(), parts["powers"].int() - 127
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        return torch.ldexp(values[halves], powers.unsqueeze(-1)).flatten(-2).mT

    for module in stored.modules("_blocks"):
        shape = stored.shape(f"{module}_blocks")
        fits = len(shape) == 4 and min(shape) > 0 and shape[3] == 16
        stored.check(fits and stored.tensors[f"{module}_blocks"].dtype == "U8", f"{module}_blocks")
        scales = stored.shape(f"{module}_scales")
        kind = stored.tensors[f"{module}_scales"].dtype
        stored.check(scales == shape[:3] and kind == "U8", f"{module}_scales")
        experts, outputs, groups, _ = shape
        stored.join(
            module, (experts, 32 * groups, outputs), "mxfp4", decode, end="", sliced=True,
            blocks="_blocks", powers="_scales",
        )  # fmt: skip
    return stored.tensors
