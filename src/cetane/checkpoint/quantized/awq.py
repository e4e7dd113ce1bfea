"""The format of casper-hansen/AutoAWQ, 'gemm'."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.quantized.packed import from_words
from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch


def read_awq(stored: QuantizedTensors) -> Tensors:
    """4 bits. Words lie along the outputs, with nibbles in the order 0 2 4 6 1 3 5 7."""
    bits = stored.integer("bits", 4)
    layout = stored.layout("gemm", "format", "version", "checkpoint_format")
    if bits != 4 or layout != "gemm":
        raise stored.bad(f"{bits} bits, format {layout!r}; only 4 bits, gemm, is supported")

    def unpack(words: torch.Tensor) -> torch.Tensor:
        nibbles = from_words(words, 4).reshape(len(words), -1, 8)
        return nibbles[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(len(words), -1)

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        scales, zeros = parts["scales"].float(), unpack(parts["zeros"])
        size = len(parts["words"]) // len(scales)
        values = unpack(parts["words"]) - zeros.repeat_interleave(size, 0)
        return (values * scales.repeat_interleave(size, 0)).T

    for module in stored.modules(".qweight"):
        inputs, words = stored.matrix(f"{module}.qweight")
        groups, outputs = stored.matrix(f"{module}.scales")
        stored.check(outputs == 8 * words and inputs % groups == 0, f"{module}.scales")
        stored.check_groups(f"{module}.scales", inputs, groups, [stored.said.get("group_size")])
        stored.check(stored.shape(f"{module}.qzeros") == (groups, words), f"{module}.qzeros")
        stored.join(
            module, (outputs, inputs), "int4", decode, words=".qweight", zeros=".qzeros",
            scales=".scales",
        )  # fmt: skip
    return stored.tensors
