"""The layouts of ModelCloud/GPTQModel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.quantized.packed import from_words
from cetane.checkpoint.quantized.scales import places
from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch


def read_gptq(stored: QuantizedTensors) -> Tensors:
    """Words along the inputs, zero points less one (not in v2), and a group for every input."""
    bits = stored.integer("bits")
    if bits not in (2, 4, 8):
        raise stored.bad(f"{bits} bits; only 2, 4 and 8 are supported")
    dynamic = stored.said.get("dynamic") or {}  # GPTQModel's settings of some modules
    stored.check(isinstance(dynamic, dict), "dynamic")
    for pattern, own in dynamic.items():
        if isinstance(own, dict) and own.get("bits", bits) != bits:
            raise stored.bad(
                f"dynamic gives {pattern} {own['bits']!r} bits; only one number of bits for all "
                "is supported"
            )
    groupings = [stored.said, *(own for own in dynamic.values() if isinstance(own, dict))]
    sizes = [each.get("group_size") for each in groupings]
    layout = stored.layout("gptq", "format", "checkpoint_format")
    if layout not in ("gptq", "gptq_v2"):
        raise stored.bad(f"format {layout!r}; only gptq and gptq_v2 are supported")
    less = 1 if layout == "gptq" else 0

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        values = from_words(parts["words"].T, bits).T
        zeros = (from_words(parts["zeros"], bits) + less) & ((1 << bits) - 1)
        scales, inputs = parts["scales"].float(), len(values)
        if "groups" in parts:
            group = places(parts["groups"])
        else:
            import torch

            group = torch.arange(inputs) // (inputs // len(scales))
        return ((values - zeros[group]) * scales[group]).T

    per = 32 // bits
    for module in stored.modules(".qweight"):
        words, outputs = stored.matrix(f"{module}.qweight")
        groups, columns = stored.matrix(f"{module}.scales")
        fits = columns == outputs and (words * per) % groups == 0
        stored.check(fits, f"{module}.scales")
        stored.check_groups(f"{module}.scales", words * per, groups, sizes)
        zeros = stored.shape(f"{module}.qzeros")
        stored.check(zeros == (groups, -(-outputs // per)) and outputs % per == 0,
                     f"{module}.qzeros")  # fmt: skip
        order = stored.tensors.get(f"{module}.g_idx")
        stored.check(order is None or order.shape == (words * per,), f"{module}.g_idx")
        stored.join(
            module, (outputs, words * per), f"int{bits}", decode, words=".qweight", zeros=".qzeros",
            scales=".scales", groups_=".g_idx",
        )  # fmt: skip
    return stored.tensors
