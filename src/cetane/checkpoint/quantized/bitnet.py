"""BitNet's weights of -1, 0 and 1, as transformers' integrations/bitnet.py packs them.

The rows of a matrix are cut into four quarters. A byte holds one weight of each quarter, plus 1, in
two bits, the first quarter in the lowest ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch

LINEAR = {"bitlinear": -1, "autobitlinear": 1}
"""The power of the scale that multiplies a weight, by the class of layers."""


def read_bitnet(stored: QuantizedTensors) -> Tensors:
    """Ternary weights, times a scale for each matrix or divided by it."""
    if stored.said.get("use_rms_norm"):
        raise stored.bad("use_rms_norm = True adds norms that no family has")
    if stored.said.get("quantization_mode", "offline") != "offline":
        raise stored.bad("only quantization_mode = 'offline' stores ternary weights")
    power = LINEAR.get(stored.layout("bitlinear", "linear_class"))
    if power is None:
        raise stored.bad(f"linear_class is none of {', '.join(LINEAR)}")

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        import torch

        quarters = [(parts["weight"] >> shift) & 3 for shift in (0, 2, 4, 6)]
        return (torch.cat(quarters).float() - 1) * parts["scale"].float() ** power

    for module in stored.modules(".weight_scale"):
        rows, columns = stored.matrix(f"{module}.weight")
        stored.check(stored.shape(f"{module}.weight_scale") == (1,), f"{module}.weight_scale")
        stored.check(stored.tensors[f"{module}.weight"].dtype == "U8", f"{module}.weight")
        stored.join(
            module, (4 * rows, columns), "ternary", decode, weight=".weight", scale=".weight_scale"
        )
    return stored.tensors
