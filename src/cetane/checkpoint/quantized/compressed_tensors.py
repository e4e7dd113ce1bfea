"""The formats of vllm-project/compressed-tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cetane.checkpoint.dtypes import to_torch
from cetane.checkpoint.quantized.packed import from_words
from cetane.checkpoint.quantized.scales import is_pair, scaled
from cetane.checkpoint.quantized.tensors import QuantizedTensors, Tensors

if TYPE_CHECKING:
    import torch


def read_compressed_tensors(stored: QuantizedTensors) -> Tensors:
    """Integers of 4 or 8 bits that are packed into int32, or int8 and fp8 as they are.

    A scale belongs to a tensor, a row, a group or a block.
    """
    plans = weight_plans(stored)
    bits = [plan.get("num_bits") for plan in plans]
    sizes = [plan.get("group_size") or -1 for plan in plans]  # without one, scales are of rows
    for module in stored.modules(".weight_packed"):
        if bits not in ([4], [8]) or type(bits[0]) is not int:
            raise stored.bad(f"packed weights of {bits} bits")
        unpack_words(stored, module, bits[0], sizes)
    blocks = [plan["block_structure"] for plan in plans if plan.get("block_structure")]
    for module in stored.modules(".weight", ("I8", "F8_E4M3")):
        join_plain(stored, module, blocks, sizes)
    return stored.tensors


def weight_plans(stored: QuantizedTensors) -> list[dict[str, Any]]:
    """How the weights of each group of modules are quantised, by the config. CetaneError for
    sparse or transformed weights, and for an unknown format."""
    known = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
    form = stored.said.get("format")
    if form not in known:
        raise stored.bad(f"format {form!r} is not one of {', '.join(known)}")
    sparsity = stored.said.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise stored.bad("its weights are sparse")
    if stored.said.get("transform_config"):
        raise stored.bad("it transforms what its layers read or write (transform_config)")
    groups = stored.said.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    stored.check(bool(groups) and all(isinstance(g, dict) for g in groups), "config_groups")
    plans: list[dict[str, Any]] = [g.get("weights") for g in groups]
    stored.check(all(isinstance(p, dict) for p in plans), "config_groups.weights")
    return plans


def join_plain(stored: QuantizedTensors, module: str, blocks: list[Any], sizes: list[Any]) -> None:
    """Join a weight of 8 bits with its scales: of blocks, if the config gives their one size in
    `blocks`; else of the tensor, of rows or of groups of one of `sizes`."""
    rows, columns = stored.matrix(f"{module}.weight")
    scale = stored.shape(f"{module}.weight_scale")
    block = None
    if blocks:
        stored.check(len(blocks) == 1 and is_pair(blocks[0]), "block_structure")
        block = tuple(blocks[0])
        fits = scale == (-(-rows // block[0]), -(-columns // block[1]))
        stored.check(fits, f"{module}.weight_scale")
    else:
        check_scales(stored, module, scale, rows, columns, sizes)
    check_zeros(stored, module, scale)
    kind = "int8" if stored.tensors[f"{module}.weight"].dtype == "I8" else "float8"
    stored.join(
        module, (rows, columns), kind, scaled(block), weight=".weight", scale=".weight_scale",
        zero_=".weight_zero_point", groups_=".weight_g_idx",
    )  # fmt: skip


def check_scales(
    stored: QuantizedTensors,
    module: str,
    scale: tuple[int, ...],
    rows: int,
    columns: int,
    sizes: list[Any],
) -> None:
    """Raise CetaneError for scales that are neither one, nor of rows, nor of groups of columns, of
    one of the sizes that the config states."""
    grouped = len(scale) == 2 and scale[0] == rows and scale[1] and columns % scale[1] == 0
    stored.check(scale in ((), (1,)) or bool(grouped), f"{module}.weight_scale")
    if grouped:
        stored.check_groups(f"{module}.weight_scale", columns, scale[1], sizes)
    order = stored.tensors.get(f"{module}.weight_g_idx")
    stored.check(order is None or order.shape == (columns,), f"{module}.weight_g_idx")


def check_zeros(stored: QuantizedTensors, module: str, shape: tuple[int, ...]) -> None:
    """Raise CetaneError for zero points of another shape."""
    zero = stored.tensors.get(f"{module}.weight_zero_point")
    stored.check(zero is None or zero.shape == shape, f"{module}.weight_zero_point")


def unpack_words(stored: QuantizedTensors, module: str, bits: int, sizes: list[Any]) -> None:
    """Unpack compressed-tensors' int32 words: columns from the lowest bits up, plus half the
    range."""
    shape = stored.take(f"{module}.weight_shape")
    assert shape is not None
    stored.check(shape.dtype in ("I64", "I32") and shape.shape == (2,), f"{module}.weight_shape")
    rows, columns = (int(n) for n in to_torch(shape))
    words = -(-columns * bits // 32)
    stored.check(rows > 0 and columns > 0, f"{module}.weight_shape")
    stored.check(
        stored.shape(f"{module}.weight_packed") == (rows, words), f"{module}.weight_packed"
    )
    scale = stored.shape(f"{module}.weight_scale")
    check_scales(stored, module, scale, rows, columns, sizes)
    check_zeros(stored, module, (-(-rows * bits // 32), *scale[1:]))
    half = 1 << (bits - 1)

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        whole = dict(parts, weight=from_words(parts["words"], bits)[:, :columns] - half)
        if "zeros" in parts:
            whole["zero"] = from_words(parts["zeros"].T, bits).T[:rows] - half
        return scaled()(whole)

    stored.join(
        module, (rows, columns), f"int{bits}", decode, words=".weight_packed",
        scale=".weight_scale", zeros_=".weight_zero_point", groups_=".weight_g_idx",
    )  # fmt: skip
