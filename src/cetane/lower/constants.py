"""The MIL pass that puts compressed constants into a program in place of dense weights."""

from typing import Any

import numpy as np
from coremltools.converters.mil.mil import Builder as mb
from coremltools.converters.mil.mil import Program, types
from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
from coremltools.converters.mil.mil.passes.helper import block_context_manager
from coremltools.converters.mil.mil.passes.pass_registry import register_pass

from cetane.compress import Affine, Dense, Encoded, Palettized
from cetane.errors import CetaneError

PASS = "cetane::place_constants"
FP16 = "_to_fp16"
"""What coremltools appends to a parameter's path when it casts the constant."""


@register_pass(namespace="cetane")
class place_constants(AbstractGraphPass):
    """Replaces the constant of every parameter in `encoded` by its compressed form.

    Runs last. The encodings were made from the parameters, so a pass that changed a weight on the
    way (say by folding a scale into it) would make them wrong: that is an error, as is a parameter
    that is not in the program.
    """

    encoded: dict[str, Encoded] = {}  # noqa: RUF012, an option that every use sets
    """By parameter path of the traced module, as `blocks.0.mlp.up_proj.weight`."""
    weights: dict[str, np.ndarray[Any, Any]] = {}  # noqa: RUF012
    """The fp16 values that the encodings were made from."""

    def apply(self, prog: Program) -> None:
        wanted = {path + FP16: path for path in self.encoded}
        for function in prog.functions.values():
            missing = dict(wanted)
            place(function, missing, self.encoded, self.weights)
            if missing:
                raise CetaneError(f"lowering lost the weight {next(iter(missing.values()))}")


@block_context_manager
def place(
    block: Any,
    missing: dict[str, str],
    encoded: dict[str, Encoded],
    weights: dict[str, np.ndarray[Any, Any]],
) -> None:
    """Replace the constants of a block; takes what it finds out of `missing`."""
    for op in list(block.operations):
        if op.op_type != "const" or op.name not in missing:
            continue
        path = missing.pop(op.name)
        constant = encoded[path]
        if not np.array_equal(op.outputs[0].val, weights[path]):
            raise CetaneError(f"lowering changed the weight {path}")
        if isinstance(constant, Dense):
            continue
        new = constexpr(constant, before=op, name=op.name.removesuffix(FP16))
        block.replace_uses_of_var_after_op(
            anchor_op=op, old_var=op.outputs[0], new_var=new, force_replace=True
        )
        block.remove_ops([op])


def constexpr(constant: Affine | Palettized, before: Any, name: str) -> Any:
    """The iOS 18 op that Core ML decodes a constant with when it loads a program."""
    if isinstance(constant, Affine):
        return mb.constexpr_blockwise_shift_scale(
            data=constant.data, scale=constant.scale, before_op=before, name=name
        )
    packed = types.nptype_from_builtin(types.string_to_builtin(f"uint{constant.bits}"))
    return mb.constexpr_lut_to_dense(
        indices=constant.indices.astype(packed), lut=constant.lut, before_op=before, name=name
    )
