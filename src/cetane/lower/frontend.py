"""The MIL form of cetane's own torch ops, registered with coremltools on import."""

from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.torch.ops import _get_inputs
from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op
from coremltools.converters.mil.mil import Operation, types
from coremltools.converters.mil.mil.input_type import InputSpec, TensorInputType
from coremltools.converters.mil.mil.ops.defs._op_reqs import register_op

from cetane import families  # noqa: F401, defines cetane::layer_norm
from cetane.lower.tracing import SMALLEST_FP16  # defines cetane::constant too


@register_torch_op(torch_alias=["cetane::layer_norm"])
def cetane_layer_norm(context: Any, node: Any) -> None:
    x, axis, eps = _get_inputs(context, node, expected=3)
    epsilon = np.float32(max(eps.val, SMALLEST_FP16))
    result = mb.layer_norm(x=x, axes=[int(axis.val)], epsilon=epsilon, name=node.name)
    context.add(result)


@register_op
class constexpr_cetane_weight(Operation):
    """A weight that has a shape and no value.

    coremltools' passes neither read nor fold an op with this prefix. So a program depends only on
    the shapes of its weights. It is fp32, as all parameters are before the pass that casts a
    program to fp16.
    """

    input_spec = InputSpec(
        label=TensorInputType(const=True, type_domain=types.str),
        shape=TensorInputType(const=True, type_domain=types.str),
    )

    def type_inference(self) -> Any:
        shape = tuple(int(size) for size in self.shape.val.split("x"))
        return types.tensor(types.fp32, shape)


@register_torch_op(torch_alias=["cetane::constant"])
def cetane_constant(context: Any, node: Any) -> None:
    label, shape = _get_inputs(context, node, expected=2)
    made = mb.constexpr_cetane_weight(label=label.val, shape=shape.val, name=label.val)
    context.add(made, torch_name=node.name)
