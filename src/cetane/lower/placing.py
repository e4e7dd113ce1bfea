"""The placing of weights into a finished program, so that no later pass can change them."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.helper import block_context_manager

from cetane.compress.encoded import Affine, Dense, Encoded
from cetane.errors import CetaneError
from cetane.lower.frontend import constexpr_cetane_weight

Parts = dict[str, np.ndarray[Any, Any]]
"""A constant as arrays, by the input names of its MIL op; a dense one has only `weight`."""


@block_context_manager
def place(function: Any, parts: Callable[[str], Parts]) -> dict[str, str]:
    """Put constants in place of the weights without values in a MIL function.

    Returns the label of every constant, by the name of its op.
    """
    placed = {}
    for op in list(function.operations):
        if op.op_type != constexpr_cetane_weight.__name__:
            continue
        label = op.label.val
        new = emit(label, op.name, parts(label), op)
        placed[new.op.name] = label
        for cast in list(op.outputs[0].child_ops):
            if cast.op_type != "cast" or cast.dtype.val != "fp16":
                raise CetaneError(f"lowering left the weight {label} in fp32")
            function.replace_uses_of_var_after_op(
                anchor_op=cast, old_var=cast.outputs[0], new_var=new, force_replace=True
            )
            function.remove_ops([cast])
        function.remove_ops([op])
    share(function)
    return placed


def emit(label: str, name: str, parts: Parts, before: Any) -> Any:
    """The iOS 18 op that makes a weight when Core ML loads a program."""
    made = {}
    for part, value in parts.items():
        full = name if part == "weight" else f"{name}_{part}"
        made[part] = mb.const(val=value, before_op=before, name=full)
        made[part].op.weight_id = f"{label}.{part}"
    if "weight" in made:
        result = made["weight"]
    elif "lut" in made:
        if parts["lut"].shape[-1] > 1:  # vectors lie along the output channels
            made["vector_axis"] = mb.const(
                val=np.int32(0), before_op=before, name=f"{name}_vector_axis"
            )
        result = mb.constexpr_lut_to_dense(**made, before_op=before, name=name)
    else:
        result = mb.constexpr_blockwise_shift_scale(**made, before_op=before, name=name)
    for var in (result, *made.values()):
        var.op.scopes = before.scopes  # the place in the torch model, which every op needs
    return result


def share(function: Any) -> None:
    """Let functions share constants that are not weights: constants with one id are stored once."""
    for op in function.operations:
        if op.op_type == "const" and op.weight_id is None and isinstance(op.val.val, np.ndarray):
            value = np.ascontiguousarray(op.val.val)
            content = hashlib.sha256(value.tobytes()).hexdigest()
            op.weight_id = f"{value.dtype} {value.shape} {content}"


def parts_of(encoded: Encoded) -> Parts:
    """A constant as arrays of coremltools' types; narrow integers take a byte each."""
    if isinstance(encoded, Dense):
        return {"weight": encoded.weight}
    if isinstance(encoded, Affine):
        return {"data": encoded.data.astype(narrow("int", encoded.bits)), "scale": encoded.scale}
    return {"indices": encoded.indices.astype(narrow("uint", encoded.bits)), "lut": encoded.lut}


def narrow(kind: str, bits: int) -> Any:
    """coremltools' numpy type for integers of `bits` bits."""
    return types.nptype_from_builtin(types.string_to_builtin(f"{kind}{bits}"))
