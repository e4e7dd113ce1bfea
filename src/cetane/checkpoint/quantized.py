"""Rules that read quantised checkpoints as plain float32 weights, one rule for each format.

A quantised weight is stored in several tensors: the integers, their scales, often zero points. A
rule joins them to one float32 tensor under the weight's own name, and removes its companions. A
format without a rule is refused by name: integers that are read as plain weights give a model that
runs and writes noise.

The rules follow the published layouts: compressed-tensors (vllm-project/compressed-tensors), fp8
(transformers' finegrained_fp8), AWQ (casper-hansen/AutoAWQ, "gemm"), GPTQ (ModelCloud/GPTQModel),
bitsandbytes (its `state_dict` of Linear8bitLt and Params4bit), MLX (`mx.quantize`, affine), mxfp4
(OCP's Microscaling Formats 1.0, in gpt-oss's layout, which transformers' integrations/mxfp4.py
reads).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.checkpoint.checkpoint import StoredTensor
from cetane.checkpoint.integers import from_fours, from_words, to_torch
from cetane.errors import CetaneError
from cetane.validation import parse_json

if TYPE_CHECKING:
    import torch

Tensors = dict[str, StoredTensor]
Decode = Callable[[dict[str, "torch.Tensor"]], "torch.Tensor"]

HINT = (
    "use the model's original weights or a GGUF file, or call `dequantize()` on it with "
    "transformers and save it"
)
FLOATS = {"F64", "F32", "F16", "BF16"}
PARTS = {
    "words": {"I32", "U32"}, "zeros": {"I32", "U32"}, "groups": {"I32", "I64"},
    "zero": {"I8", "I32", "F8_E4M3", *FLOATS}, "indices": {"U8"},
    **dict.fromkeys(("scale", "scales", "biases", "values", "outer", "outer_values"), FLOATS),
}  # fmt: skip
"""The dtypes that a part may have, by its role. Rules check those of other roles."""
COMPANIONS = (
    "_scale", "_scale_inv", "_scales", ".scales", ".qweight", ".qzeros", ".g_idx", "_g_idx",
    "_zero_point", "_packed", "_blocks", ".biases", ".SCB", ".absmax", ".nested_absmax",
    ".quant_map", ".nested_quant_map", "_global_scale", ".weight_format", ".weight_shape",
)  # fmt: skip
"""Endings of tensors that only quantised weights have beside them."""
ACTIVATIONS = (".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")
"""Endings of scales of inputs, outputs and caches, on which the weights do not depend."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor(StoredTensor):
    """A weight that is stored in several tensors, and read as float32 of `shape`."""

    parts: dict[str, StoredTensor]
    decode: Decode
    label: str
    """Its storage, for messages and tables: `int4 (awq)`."""
    sliced: bool = False
    """Whether rows of the weight are decoded from the same rows of its parts."""

    @property
    def stored_as(self) -> str:
        return self.label

    def values(self) -> torch.Tensor:
        """The weight, float32 of `shape`. Raises CetaneError if its parts do not fit each other."""
        parts = {role: to_torch(part) for role, part in self.parts.items()}
        try:
            return self.decode(parts).float().reshape(self.shape)
        except (RuntimeError, IndexError, ValueError) as error:
            raise CetaneError(
                f"{self.file}: a weight of {self.label} does not fit its scales"
            ) from error

    def read(self) -> bytearray:
        return bytearray(self.values().contiguous().numpy().data.cast("B"))

    def rows(self, start: int, stop: int) -> StoredTensor:
        row = self.nbytes // max(1, self.shape[0])
        shape, nbytes = (stop - start, *self.shape[1:]), (stop - start) * row
        if self.sliced:
            parts = {role: part.rows(start, stop) for role, part in self.parts.items()}
            return replace(self, shape=shape, nbytes=nbytes, parts=parts)

        def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.decode(parts)[start:stop].clone()

        return replace(self, shape=shape, nbytes=nbytes, decode=decode)


def dequantized(
    tensors: Tensors, config: dict[str, Any], path: Path
) -> tuple[Tensors, dict[str, Any], str | None]:
    """The tensors with every quantised weight as one, the config without its quantisation, and the
    format's name; None if the checkpoint is not quantised.

    Raises CetaneError for a format without a rule, and for companions that are left over.
    """
    keys = ("quantization_config", "quantization", "compression_config")
    said = next((config[key] for key in keys if config.get(key)), None)
    rest = {key: value for key, value in config.items() if key not in keys}
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
        beside = {f"{base}.weight", f"{base}.qweight", f"{base}_blocks", base}
        alone = name.endswith((".qweight", "_packed", "_blocks", ".SCB")) and tensor.dtype != "F32"
        if ".quant_state." in name or (base is not None and (alone or beside & set(tensors))):
            raise refusal(path, "unnamed", f"{name} belongs to a quantised weight")
        if name.endswith(".weight") and tensor.dtype not in FLOATS:
            raise refusal(path, "unnamed", f"{name} holds {tensor.dtype} without a scale")


def refusal(path: Path, method: str, why: str) -> CetaneError:
    """The error for a quantisation that cetane cannot read; `path` is the config.json."""
    return CetaneError(f"{path.parent}: its weights are quantised ({method}): {why}", HINT)


class QuantizedTensors:
    """The tensors of a quantised checkpoint, and the quantisation in its config."""

    def __init__(self, method: str, path: Path, said: dict[str, Any], tensors: Tensors) -> None:
        self.method, self.path, self.said = method, path, said
        self.tensors = {n: t for n, t in tensors.items() if not n.endswith(ACTIVATIONS)}

    def bad(self, why: str) -> CetaneError:
        return refusal(self.path, self.method, why)

    def check(self, holds: bool, what: str) -> None:
        """Raise CetaneError unless something that the format asks of `what` holds."""
        if not holds:
            raise self.bad(f"{what} does not fit the format")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.said.get(key, default)
        if type(value) is not int or not -1 <= value <= 2**20:
            raise self.bad(f"{key} = {value!r}")
        return value

    def modules(self, end: str, dtypes: tuple[str, ...] = ()) -> list[str]:
        """The modules that have a tensor with this ending, such as `.weight`, of these dtypes."""
        return [
            name.removesuffix(end)
            for name, tensor in self.tensors.items()
            if name.endswith(end) and (not dtypes or tensor.dtype in dtypes)
        ]

    def take(self, name: str, optional: bool = False) -> StoredTensor | None:
        """Remove a tensor, and return it. CetaneError if it is missing, unless `optional`."""
        tensor = self.tensors.pop(name, None)
        if tensor is None and not optional:
            raise self.bad(f"{name} is missing")
        return tensor

    def join(
        self,
        module: str,
        shape: tuple[int, ...],
        label: str,
        decode: Decode,
        end: str = ".weight",
        sliced: bool = False,
        **names: str,
    ) -> None:
        """Replace the parts of a weight, named by role, by one tensor. A role that ends in `_` may
        be missing. CetaneError for a part of another dtype."""
        parts = {}
        for role, name in names.items():
            part = self.take(f"{module}{name}", optional=role.endswith("_"))
            if part is not None:
                kind = role.rstrip("_")
                self.check(part.dtype in PARTS.get(kind, {part.dtype}),
                           f"{module}{name} in {part.dtype}")  # fmt: skip
                parts[kind] = part
        first = next(iter(parts.values()))
        nbytes = 4 * math.prod(shape)
        self.tensors[f"{module}{end}"] = QuantizedTensor(
            first.file,
            first.offset,
            nbytes,
            shape,
            "F32",
            parts,
            decode,
            f"{label} ({self.method})",
            sliced,
        )

    def stored(self, name: str) -> StoredTensor:
        """A tensor, which stays. CetaneError if it is missing."""
        if name not in self.tensors:
            raise self.bad(f"{name} is missing")
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored(name).shape

    def matrix(self, name: str) -> tuple[int, int]:
        shape = self.shape(name)
        self.check(len(shape) == 2 and min(shape) > 0, name)
        return shape[0], shape[1]


def fp8(layout: QuantizedTensors) -> Tensors:
    """float8_e4m3 with a scale for each block of 128 by 128, or for the tensor: DeepSeek, Qwen."""
    block = layout.said.get("weight_block_size") or [128, 128]
    layout.check(is_pair(block), "weight_block_size")
    for module in layout.modules(".weight", ("F8_E4M3", "F8_E5M2")):
        rows, columns = layout.matrix(f"{module}.weight")
        end = "_scale_inv" if f"{module}.weight_scale_inv" in layout.tensors else "_scale"
        scale = layout.shape(f"{module}.weight{end}")
        blocks = (-(-rows // block[0]), -(-columns // block[1]))
        layout.check(scale in ((), (1,), (rows, 1), blocks), f"{module}.weight{end}")
        size = tuple(block) if scale == blocks else None
        layout.join(
            module, (rows, columns), "float8", scaled(size), weight=".weight",
            scale=f".weight{end}",
        )  # fmt: skip
    return layout.tensors


def is_pair(block: Any) -> bool:
    """Whether `block` is a pair: the rows and columns of a block."""
    return (
        isinstance(block, list) and len(block) == 2 and all(type(b) is int and b > 0 for b in block)
    )


def scaled(block: tuple[int, ...] | None = None) -> Decode:
    """(weight - zero) * scale, with a scale for all, each row, each group of columns, or each
    block."""

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, scale = parts["weight"].float(), parts["scale"].float()
        rows, columns = weight.shape

        def spread(values: torch.Tensor) -> torch.Tensor:
            if block is not None:
                high, wide = min(block[0], rows), min(block[1], columns)
                tall = values.repeat_interleave(high, 0)[:rows]
                return tall.repeat_interleave(wide, 1)[:, :columns]
            if values.numel() == 1:
                return values.reshape(1, 1)
            if "groups" in parts:
                return values[:, places(parts["groups"])]
            return values.repeat_interleave(columns // values.shape[1], 1)

        zero = parts.get("zero")
        return (weight if zero is None else weight - spread(zero.float())) * spread(scale)

    return decode


def places(groups: torch.Tensor) -> torch.Tensor:
    """The groups of a weight's columns, as indices. IndexError for negative ones, which torch would
    count from the end."""
    if bool((groups < 0).any()):
        raise IndexError("a group below 0")
    return groups.long()


def compressed_tensors(layout: QuantizedTensors) -> Tensors:
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


def awq(layout: QuantizedTensors) -> Tensors:
    """4 bits. Words lie along the outputs, with nibbles in the order 0 2 4 6 1 3 5 7."""
    version = str(layout.said.get("version", "gemm")).lower()
    if layout.integer("bits", 4) != 4 or version != "gemm":
        raise layout.bad(
            f"{layout.said.get('bits')} bits, version {version!r}; only 4 bits, gemm, is supported"
        )

    def unpack(words: torch.Tensor) -> torch.Tensor:
        nibbles = from_words(words, 4).reshape(len(words), -1, 8)
        return nibbles[:, :, [0, 4, 1, 5, 2, 6, 3, 7]].reshape(len(words), -1)

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        scales, zeros = parts["scales"].float(), unpack(parts["zeros"])
        size = len(parts["words"]) // len(scales)
        values = unpack(parts["words"]) - zeros.repeat_interleave(size, 0)
        return (values * scales.repeat_interleave(size, 0)).T

    for module in layout.modules(".qweight"):
        inputs, words = layout.matrix(f"{module}.qweight")
        groups, outputs = layout.matrix(f"{module}.scales")
        layout.check(outputs == 8 * words and inputs % groups == 0, f"{module}.scales")
        layout.check(layout.shape(f"{module}.qzeros") == (groups, words), f"{module}.qzeros")
        layout.join(
            module, (outputs, inputs), "int4", decode, words=".qweight", zeros=".qzeros",
            scales=".scales",
        )  # fmt: skip
    return layout.tensors


def gptq(layout: QuantizedTensors) -> Tensors:
    """Words along the inputs, zero points less one (not in v2), and a group for every input."""
    bits = layout.integer("bits")
    if bits not in (2, 4, 8):
        raise layout.bad(f"{bits} bits; only 2, 4 and 8 are supported")
    form = layout.said.get("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise layout.bad(f"checkpoint_format {form!r}; only gptq and gptq_v2 are supported")
    less = 1 if form == "gptq" else 0

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
    for module in layout.modules(".qweight"):
        words, outputs = layout.matrix(f"{module}.qweight")
        groups, columns = layout.matrix(f"{module}.scales")
        fits = columns == outputs and (words * per) % groups == 0
        layout.check(fits, f"{module}.scales")
        zeros = layout.shape(f"{module}.qzeros")
        layout.check(zeros == (groups, -(-outputs // per)) and outputs % per == 0,
                     f"{module}.qzeros")  # fmt: skip
        order = layout.tensors.get(f"{module}.g_idx")
        layout.check(order is None or order.shape == (words * per,), f"{module}.g_idx")
        layout.join(
            module, (outputs, words * per), f"int{bits}", decode, words=".qweight", zeros=".qzeros",
            scales=".scales", groups_=".g_idx",
        )  # fmt: skip
    return layout.tensors


def bitsandbytes(layout: QuantizedTensors) -> Tensors:
    """int8 rows, or blocks of 4-bit indices, each with its largest magnitude."""

    def rows(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        return parts["weight"].float() * (parts["largest"].float() / 127)[:, None]

    for module in layout.modules(".SCB"):
        shape = layout.matrix(f"{module}.weight")
        layout.check(
            layout.shape(f"{module}.SCB") == (shape[0],)
            and layout.tensors[f"{module}.SCB"].dtype in FLOATS, f"{module}.SCB",
        )  # fmt: skip
        layout.check(layout.tensors[f"{module}.weight"].dtype == "I8", f"{module}.weight")
        layout.take(f"{module}.weight_format", optional=True)
        layout.join(module, shape, "int8", rows, weight=".weight", largest=".SCB")
    for kind in ("nf4", "fp4"):
        end = f".weight.quant_state.bitsandbytes__{kind}"
        for module in layout.modules(end):
            fours(layout, module, kind, end)
    return layout.tensors


def fours(layout: QuantizedTensors, module: str, kind: str, end: str) -> None:
    """Join a 4-bit weight of bitsandbytes, whose state is JSON in a tensor."""
    stored = layout.take(f"{module}{end}")
    assert stored is not None
    layout.check(stored.nbytes <= 4096, f"{module}{end}")
    state = parse_json(stored.read(), f"{layout.path.parent}: {module}{end}")
    layout.check(isinstance(state, dict), f"{module}{end}")
    block, shape = state.get("blocksize"), state.get("shape")
    layout.check(
        type(block) is int and block > 0 and isinstance(shape, list) and len(shape) == 2
        and all(type(n) is int and 0 < n <= 2**31 for n in shape), f"{module}{end}",
    )  # fmt: skip
    count = math.prod(shape)
    fits = layout.stored(f"{module}.weight").nbytes == -(-count // 2)
    layout.check(fits and layout.shape(f"{module}.weight.quant_map") == (16,), f"{module}.weight")
    blocks = -(-count // block)
    nested, offset = state.get("nested_blocksize"), state.get("nested_offset", 0.0)
    kinds = FLOATS if nested is None else {"U8"}
    fits = layout.shape(f"{module}.weight.absmax") == (blocks,)
    layout.check(fits and layout.tensors[f"{module}.weight.absmax"].dtype in kinds,
                 f"{module}.weight.absmax")  # fmt: skip
    if nested is not None:
        layout.check(type(nested) is int and nested > 0 and isinstance(offset, int | float)
                     and layout.shape(f"{module}.weight.nested_quant_map") == (256,)
                     and layout.shape(f"{module}.weight.nested_absmax") == (-(-blocks // nested),),
                     f"{module}{end}")  # fmt: skip

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        largest = parts["largest"]
        if nested is not None:
            outer = parts["outer"].repeat_interleave(min(nested, blocks))[:blocks]
            largest = parts["outer_values"][largest.long()] * outer + offset
        values = parts["values"][from_fours(parts["indices"])[:count]]
        spread = largest.float().repeat_interleave(min(block, count))[:count]
        return (values * spread).reshape(shape)

    layout.join(
        module, tuple(shape), kind, decode, indices=".weight", values=".weight.quant_map",
        largest=".weight.absmax", outer_=".weight.nested_absmax",
        outer_values_=".weight.nested_quant_map",
    )  # fmt: skip


def mlx(layout: QuantizedTensors) -> Tensors:
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


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a 4-bit float; the highest bit is the sign."""


def mxfp4(layout: QuantizedTensors) -> Tensors:
    """gpt-oss: 4-bit floats, the low half of a byte first. A block of 32 has a power of two, stored
    plus 127. transformers keeps these matrices transposed."""

    def decode(parts: dict[str, torch.Tensor]) -> torch.Tensor:
        import torch

        values = torch.tensor([*E2M1, *(-value for value in E2M1)])
        blocks, powers = parts["blocks"].int(), parts["powers"].int() - 127
        halves = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
        return torch.ldexp(values[halves], powers.unsqueeze(-1)).flatten(-2).mT

    for module in layout.modules("_blocks"):
        shape = layout.shape(f"{module}_blocks")
        fits = len(shape) == 4 and min(shape) > 0 and shape[3] == 16
        layout.check(fits and layout.tensors[f"{module}_blocks"].dtype == "U8", f"{module}_blocks")
        scales = layout.shape(f"{module}_scales")
        kind = layout.tensors[f"{module}_scales"].dtype
        layout.check(scales == shape[:3] and kind == "U8", f"{module}_scales")
        experts, outputs, groups, _ = shape
        layout.join(
            module, (experts, 32 * groups, outputs), "mxfp4", decode, end="", sliced=True,
            blocks="_blocks", powers="_scales",
        )  # fmt: skip
    return layout.tensors


RULES: dict[str, Callable[[QuantizedTensors], Tensors]] = {
    "fp8": fp8,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "bitsandbytes": bitsandbytes,
    "mlx": mlx,
    "mxfp4": mxfp4,
}
