"""The layouts of vllm-project/compressed-tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cetane.checkpoint.integers import from_words, to_torch
from cetane.checkpoint.quantized.layout import QuantizedTensors, Tensors
from cetane.checkpoint.quantized.scales import is_pair, scaled

if TYPE_CHECKING:
    import torch


def read_compressed_tensors(layout: QuantizedTensors) -> Tensors:
    """int8 and fp8 stored plainly, int4 packed into int32; a scale for a tensor, row or group."""
    plans = weight_plans(layout)
    bits = [plan.get("num_bits") for plan in plans]
    for module in layout.modules(".weight_packed"):
        if bits not in ([4], [8]) or type(bits[0]) is not int:
            raise layout.bad(f"packed weights of {bits} bits")
        unpack_words(layout, module, bits[0])
    blocks = [plan["block_structure"] for plan in plans if plan.get("block_structure")]
    for module in layout.modules(".weight", ("I8", "F8_E4M3")):
        join_plain(layout, module, blocks)
    return layout.tensors


def weight_plans(layout: QuantizedTensors) -> list[dict[str, Any]]:
    """How the weights of each group of modules are quantised, by the config. CetaneError for
    sparse or transformed weights, and for an unknown format."""
    known = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
    form = layout.said.get("format")
    if form not in known:
        raise layout.bad(f"format {form!r} is not one of {', '.join(known)}")
    sparsity = layout.said.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise layout.bad("its weights are sparse")
    if layout.said.get("transform_config"):
        raise layout.bad("it transforms what its layers read or write (transform_config)")
    groups = layout.said.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    layout.check(bool(groups) and all(isinstance(g, dict) for g in groups), "config_groups")
    plans: list[dict[str, Any]] = [g.get("weights") for g in groups]
    layout.check(all(isinstance(p, dict) for p in plans), "config_groups.weights")
    return plans


def join_plain(layout: QuantizedTensors, module: str, blocks: list[Any]) -> None:
    """Join a weight of 8 bits with its scales: of blocks, if the config gives their one size in
    `blocks`; else of the tensor, of rows or of groups."""
    rows, columns = layout.matrix(f"{module}.weight")
    scale = layout.shape(f"{module}.weight_scale")
    block = None
    if blocks:
        layout.check(len(blocks) == 1 and is_pair(blocks[0]), "block_structure")
        block = tuple(blocks[0])
        fits = scale == (-(-rows // block[0]), -(-columns // block[1]))
        layout.check(fits, f"{module}.weight_scale")
    else:
        check_scales(layout, module, scale, rows, columns)
    check_zeros(layout, module, scale)
    kind = "int8" if layout.tensors[f"{module}.weight"].dtype == "I8" else "float8"
    layout.join(
        module, (rows, columns), kind, scaled(block), weight=".weight", scale=".weight_scale",
        zero_=".weight_zero_point", groups_=".weight_g_idx",
    )  # fmt: skip


def check_scales(
    layout: QuantizedTensors, module: str, scale: tuple[int, ...], rows: int, columns: int
) -> None:
    """Raise CetaneError for scales that are neither one, nor of rows, nor of groups of columns."""
    grouped = len(scale) == 2 and scale[0] == rows and scale[1] and columns % scale[1] == 0
    layout.check(scale in ((), (1,)) or bool(grouped), f"{module}.weight_scale")
    order = layout.tensors.get(f"{module}.weight_g_idx")
    layout.check(order is None or order.shape == (columns,), f"{module}.weight_g_idx")


def check_zeros(layout: QuantizedTensors, module: str, shape: tuple[int, ...]) -> None:
    """Raise CetaneError for zero points of another shape."""
    zero = layout.tensors.get(f"{module}.weight_zero_point")
    layout.check(zero is None or zero.shape == shape, f"{module}.weight_zero_point")


def unpack_words(layout: QuantizedTensors, module: str, bits: int) -> None:
    """Unpack compressed-tensors' int32 words: columns from the lowest bits up, plus half the
    range."""
    stored = layout.take(f"{module}.weight_shape")
    assert stored is not None
    layout.check(stored.dtype in ("I64", "I32") and stored.shape == (2,), f"{module}.weight_shape")
    rows, columns = (int(n) for n in to_torch(stored))
    words = -(-columns * bits // 32)
    layout.check(rows > 0 and columns > 0, f"{module}.weight_shape")
    layout.check(
        layout.shape(f"{module}.weight_packed") == (rows, words), f"{module}.weight_packed"
    )
    scale = layout.shape(f"{module}.weight_scale")
    check_scales(layout, module, scale, rows, columns)
    check_zeros(layout, module, (-(-rows * bits // 32), *scale[1:]))
    half = 1 << (bits - 1)

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = dict(parts, weight=from_words(parts["words"], bits)[:, :columns] - half)
        if "zeros" in parts:
            whole["zero"] = from_words(parts["zeros"].T, bits).T[:rows] - half
        return scaled()(whole)

    layout.join(
        module, (rows, columns), f"int{bits}", decode, words=".weight_packed",
        scale=".weight_scale", zeros_=".weight_zero_point", groups_=".weight_g_idx",
    )  # fmt: skip
