"""Converts torch modules to a Core AI program.

`torch.export` traces a module whose weights are names without values, as Core ML's lowering does.
coreai-torch converts the graph, and each name becomes the constant of its format. So neither torch
nor the graph's passes see a weight, and the codes are those of the bundle.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from cetane.compress.encoded import Affine, Dense, Encoded, Palettized
from cetane.errors import CetaneError, installing
from cetane.export.coreai.adapter import write_columns  # noqa: F401, defines an op
from cetane.lower.tracing import LabelledWeight, replaced

if TYPE_CHECKING:
    from coreai.authoring import AIProgram


def import_coreai() -> ModuleType:
    """The package coreai_torch, without its remarks. Raises CetaneError if the extra is absent.

    Its packages have wheels for Linux on x86-64, and for macOS 26 on Apple silicon.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import coreai_torch
    except ImportError as error:
        message = f"Core AI's packages are not installed: {error}"
        raise CetaneError(message, installing("coreai")) from error
    return coreai_torch


@torch.library.custom_op("cetane::half_constant", mutates_args=())
def half_constant(label: str, shape: str) -> Tensor:
    """A stand-in for the weight `label`: fp16 zeros of a shape such as "8x4x1x1"."""
    return torch.zeros((), dtype=torch.float16).expand([int(size) for size in shape.split("x")])


@half_constant.register_fake
def _(label: str, shape: str) -> Tensor:
    return torch.empty([int(size) for size in shape.split("x")], dtype=torch.float16)


class Converter:
    """Collects functions, and makes one program of them, which stores each weight once."""

    def __init__(self, constant: Callable[[str], Encoded]) -> None:
        """`constant` gives the weight of a label."""
        torch_package = import_coreai()
        self.converter = torch_package.TorchConverter(
            mode=torch_package.TorchConverter.Mode.RELEASE
        )
        self.table = torch_package.get_decomp_table()
        self.table[torch.ops.cetane.layer_norm.default] = norm_of_last_axis
        self.attributes = cache(lambda label: attributes(constant(label)))
        register = self.converter.register_torch_lowering
        register("cetane::half_constant.default")(self.lower_constant)
        register("cetane::write_columns.default")(lower_write)

    def add(
        self,
        name: str,
        module: nn.Module,
        examples: Sequence[Tensor],
        inputs: Sequence[str],
        outputs: Sequence[str],
        states: Sequence[str] = (),
        used: Sequence[LabelledWeight] = (),
    ) -> None:
        """Add a function. `examples` are one tensor for each input and state, in the order of
        `forward`; `used` are the weights of the module."""

        def named(item: LabelledWeight) -> Tensor:
            shape = "x".join(map(str, item.weight.shape))
            made: Tensor = torch.ops.cetane.half_constant(item.label, shape)
            return made

        with replaced(list(used)) as replace, torch.no_grad(), quiet():
            hook = module.register_forward_pre_hook(lambda *_: replace(named))
            try:
                exported = torch.export.export(module.eval(), tuple(examples), strict=False)
            finally:
                hook.remove()
            exported = exported.run_decompositions(self.table)
            self.converter.add_exported_program(
                exported,
                input_names=list(inputs),
                output_names=list(outputs),
                state_names=list(states),
                entrypoint_name=name,
            )

    def program(self) -> "AIProgram":
        """The program of all functions."""
        with quiet():
            return self.converter.to_coreai()

    def lower_constant(self, values: Any, node: Any, location: Any) -> Any:
        """The value of a weight: a constant, or the op that decodes one."""
        from coreai._compiler.dialects import coreai

        kind, *parts = self.attributes(node.args[0])
        made = [coreai.ConstantOp(value=part).result for part in parts]
        if kind is Dense:
            return made[0]
        if kind is Palettized:
            axis = coreai.constant(np.array(0, np.int16), loc=location)
            return coreai.lut_to_dense(*made, axis, loc=location)
        return coreai.blockwise_shift_scale(*made, loc=location)


def attributes(encoded: Encoded) -> tuple[Any, ...]:
    """The class of an encoded weight, and the attributes of its constants."""
    from coreai._compiler.ir import IntegerType

    if isinstance(encoded, Dense):
        return Dense, attribute(encoded.weight)
    if isinstance(encoded, Palettized):
        indices = attribute(
            encoded.packed(), encoded.indices.shape, IntegerType.get_unsigned(encoded.bits)
        )
        return Palettized, indices, attribute(encoded.lut)
    integer = IntegerType.get_signed(encoded.bits)
    data = attribute(encoded.packed(), encoded.data.shape, integer)
    scale = encoded.scale
    zeros = np.zeros(scale.size * encoded.bits // 8 + 1, np.uint8)
    packed = zeros[: -(-scale.size * encoded.bits // 8)]
    return (
        Affine, data, attribute(scale), attribute(packed, scale.shape, integer),
        attribute(np.zeros_like(scale)),
    )  # fmt: skip


def attribute(
    content: np.ndarray[Any, Any], shape: tuple[int, ...] | None = None, kind: Any = None
) -> Any:
    """A constant's attribute: an fp16 array, or bytes that hold integers of a kind."""
    import coreai._compiler._mlir_libs._coreaiIR._bindings.mlir as mlir
    from coreai._compiler.ir import F16Type, Location, RankedTensorType

    tensor = RankedTensorType.get(list(shape or content.shape), kind or F16Type.get())
    if kind is not None and kind.width == 8:
        content = content.view(np.int8 if kind.is_signed else np.uint8).reshape(shape)
    return mlir.dialects.coreai.create_elements_attr(Location.unknown(), tensor, content)


def lower_write(values: Any, node: Any, location: Any) -> Any:
    """`write_columns` as one `slice_update`."""
    from coreai._compiler.dialects import coreai

    state, new, row, start = node.args
    (_, *_, width) = new.meta["val"].shape
    before = coreai.constant(np.array([row, 0, 0, 0], np.int32))
    inside = coreai.constant(np.array([row + 1, *state.meta["val"].shape[1:4]], np.int32))
    first = values[start.name]
    last = coreai.broadcasting_add(first, coreai.constant(np.array([width], np.int32)))
    begin, end = coreai.concat(0, [before, first]), coreai.concat(0, [inside, last])
    return coreai.slice_update(values[state.name], begin, end, [1] * 5, values[new.name])


def norm_of_last_axis(x: Tensor, axis: int, eps: float) -> Tensor:
    """`cetane::layer_norm` as torch's, whose axis is the last: Core AI has it as one operation."""
    moved = x.transpose(axis, -1)
    shape = moved.shape[-1:]
    gains, biases = torch.ones(shape, dtype=x.dtype), torch.zeros(shape, dtype=x.dtype)
    normed = nn.functional.layer_norm(moved, shape, gains, biases, eps)
    return normed.transpose(axis, -1)


@contextmanager
def quiet() -> Iterator[None]:
    """A context without warnings and progress bars: the caller reports progress."""
    with (
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield
