"""Rules that read quantised checkpoints as plain float32 weights, one file for each format.

A quantised weight is stored in several tensors: the integers, their scales, often zero points. A
rule joins them to one float32 tensor under the weight's own name, and removes its companions. A
format without a rule is refused by name: integers that are read as plain weights give a model that
runs and writes noise.

Each rule follows the published format that its file names.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cetane.checkpoint.quantized.awq import read_awq
from cetane.checkpoint.quantized.bitnet import read_bitnet
from cetane.checkpoint.quantized.bitsandbytes import read_bitsandbytes
from cetane.checkpoint.quantized.compressed_tensors import read_compressed_tensors
from cetane.checkpoint.quantized.fp8 import read_fp8
from cetane.checkpoint.quantized.gptq import read_gptq
from cetane.checkpoint.quantized.mlx import read_mlx
from cetane.checkpoint.quantized.mxfp4 import read_mxfp4
from cetane.checkpoint.quantized.tensors import (
    FLOATS,
    QuantizedTensor,
    QuantizedTensors,
    Tensors,
    refusal,
)
from cetane.errors import CetaneError

__all__ = ["QuantizedTensor", "dequantized"]

RULES: dict[str, Callable[[QuantizedTensors], Tensors]] = {
    "fp8": read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "awq": read_awq,
    "gptq": read_gptq,
    "bitsandbytes": read_bitsandbytes,
    "bitnet": read_bitnet,
    "mlx": read_mlx,
    "mxfp4": read_mxfp4,
}
QUANTIZATION_KEYS = ("quantization_config", "quantization", "compression_config")
"""The keys of a config that tell a checkpoint's quantisation."""
COMPANIONS = (
    "_scale", "_scale_inv", "_scales", ".scales", ".qweight", ".qzeros", ".g_idx", "_g_idx",
    "_zero_point", "_packed", "_blocks", ".biases", ".SCB", ".absmax", ".nested_absmax",
    ".quant_map", ".nested_quant_map", "_global_scale", ".weight_format", ".weight_shape",
)  # fmt: skip
"""Endings of tensors that only quantised weights have beside them."""


def dequantized(
    tensors: Tensors, config: dict[str, Any], path: Path
) -> tuple[Tensors, dict[str, Any], str | None]:
    """The tensors with every quantised weight as one, the config without its quantisation, and the
    format's name; None if the checkpoint is not quantised.

    Raises CetaneError for a format without a rule, and for companions that are left over.
    """
    said = next((config[key] for key in QUANTIZATION_KEYS if config.get(key)), None)
    rest = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    name = None
    if said is not None:
        if not isinstance(said, dict):
            raise CetaneError(f"{path}: quantization_config is not an object")
        mlx = "quant_method" not in said and "group_size" in said
        name = "mlx" if mlx else str(said.get("quant_method", "unnamed")).replace("_", "-")
        if name not in RULES:
            raise refusal(path, name, "cetane has no rule for it")
        tensors = RULES[name](QuantizedTensors(name, path, said, tensors))
        kinds = {t.label for t in tensors.values() if isinstance(t, QuantizedTensor)}
        name = ", ".join(sorted(kinds)) or name
    refuse_leftovers(tensors, path)
    return tensors, rest, name


def refuse_leftovers(tensors: Tensors, path: Path) -> None:
    """Raise CetaneError for a leftover companion, or for integers under a weight's name."""
    for name, tensor in tensors.items():
        base = next((name.removesuffix(end) for end in COMPANIONS if name.endswith(end)), None)
        alone = name.endswith((".qweight", "_packed", "_blocks", ".SCB")) and tensor.dtype != "F32"
        beside = (f"{base}.weight", f"{base}.qweight", f"{base}_blocks", base)
        companion = base is not None and (alone or any(other in tensors for other in beside))
        if companion or ".quant_state." in name:
            raise refusal(path, "unnamed", f"{name} belongs to a quantised weight")
        # Experts that are stored as one tensor have no `.weight`.
        if name.endswith((".weight", "_proj")) and tensor.dtype not in FLOATS:
            raise refusal(path, "unnamed", f"{name} holds {tensor.dtype} without a scale")
