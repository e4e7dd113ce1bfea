"""How our own torch ops become MIL: registered with coremltools' torch frontend on import."""

from typing import Any

import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.frontend.torch.ops import _get_inputs
from coremltools.converters.mil.frontend.torch.torch_op_registry import register_torch_op

from cetane.families import layers  # noqa: F401, defines the ops that are registered here


@register_torch_op(torch_alias=["cetane::layer_norm"])
def cetane_layer_norm(context: Any, node: Any) -> None:
    x, axis, eps = _get_inputs(context, node, expected=3)
    result = mb.layer_norm(x=x, axes=[int(axis.val)], epsilon=np.float32(eps.val), name=node.name)
    context.add(result)
