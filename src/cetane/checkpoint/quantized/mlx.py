"""The format of MLX: `mx.quantize`, affine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.quantized.packed import from_words
from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch


def read_mlx(stored: QuantizedTensors) -> Tensors:
    """integers * scale + bias for each group of columns; columns from a word's lowest bits up."""
    if stored.said.get("mode", "affine") != "affine":
        raise stored.bad(f"mode {stored.said['mode']!r}; only affine is supported")
    for module in stored.modules(".scales"):
        own = stored.said.get(module)
        said = {**stored.said, **own} if isinstance(own, dict) else stored.said
        bits = said.get("bits")
        if type(bits) is not int or bits not in (2, 4, 8) or said.get("mode", "affine") != "affine":
            raise stored.bad(f"{module}: {bits!r} bits; only 2, 4 and 8 are supported")
        rows, words = stored.matrix(f"{module}.weight")
        columns = words * 32 // bits
        grouping = stored.matrix(f"{module}.scales")
        stored.check(
            grouping[0] == rows and columns % grouping[1] == 0
            and stored.shape(f"{module}.biases") == grouping, f"{module}.scales",
        )  # fmt: skip

        stored.check_groups(f"{module}.scales", columns, grouping[1], [said.get("group_size")])

        def decode(
            parts: dict[str, torch.Tensor], bits: int = bits, columns: int = columns
        ) -> torch.Tensor:
            values = from_words(parts["words"], bits).float()
            size = columns // parts["scales"].shape[1]
            scales, biases = (
                parts[role].float().repeat_interleave(size, 1) for role in ("scales", "biases")
            )
            return values * scales + biases

        stored.join(
            module, (rows, columns), f"int{bits}", decode, words=".weight", scales=".scales",
            biases=".biases",
        )  # fmt: skip
    return stored.tensors
