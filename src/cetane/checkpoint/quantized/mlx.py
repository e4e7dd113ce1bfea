"""The layout of MLX: `mx.quantize`, affine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.integers import from_words
from cetane.checkpoint.quantized.layout import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch


def read_mlx(layout: QuantizedTensors) -> Tensors:
    """integers * scale + bias for each group of columns; columns from a word's lowest bits up."""
    if layout.said.get("mode", "affine") != "affine":
        raise layout.bad(f"mode {layout.said['mode']!r}; only affine is supported")
    for module in layout.modules(".scales"):
        own = layout.said.get(module)
        said = {**layout.said, **own} if isinstance(own, dict) else layout.said
        bits = said.get("bits")
        if type(bits) is not int or bits not in (2, 4, 8) or said.get("mode", "affine") != "affine":
            raise layout.bad(f"{module}: {bits!r} bits; only 2, 4 and 8 are supported")
        rows, words = layout.matrix(f"{module}.weight")
        columns = words * 32 // bits
        grouping = layout.matrix(f"{module}.scales")
        layout.check(
            grouping[0] == rows and columns % grouping[1] == 0
            and layout.shape(f"{module}.biases") == grouping, f"{module}.scales",
        )  # fmt: skip

        def decode(
            parts: dict[str, torch.Tensor], bits: int = bits, columns: int = columns
        ) -> torch.Tensor:
            values = from_words(parts["words"], bits).float()
            size = columns // parts["scales"].shape[1]
            scales, biases = (
                parts[role].float().repeat_interleave(size, 1) for role in ("scales", "biases")
            )
            return values * scales + biases

        layout.join(
            module, (rows, columns), f"int{bits}", decode, words=".weight", scales=".scales",
            biases=".biases",
        )  # fmt: skip
    return layout.tensors
