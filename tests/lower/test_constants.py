"""The pass that places compressed constants refuses to place a wrong one."""

from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types
from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

import cetane.lower.constants
from cetane.compress import parse_format
from cetane.errors import CetaneError

WEIGHT = np.random.default_rng(3).normal(size=(8, 4, 1, 1)).astype(np.float16)


def program(name: str = "w_to_fp16") -> Any:
    """One convolution, its weight a constant called as coremltools calls a cast parameter."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, 4, 1, 2), dtype=types.fp16)], opset_version=ct.target.iOS18
    )
    def made(x: Any) -> Any:
        return mb.conv(x=x, weight=mb.const(val=WEIGHT, name=name))

    return made


def place(prog: Any, format_name: str = "int8-per-channel", **weights: np.ndarray) -> Any:
    """Run the pass; the encodings are those of `weights`."""
    pass_ = PASS_REGISTRY[cetane.lower.constants.PASS]
    pass_.encoded = {path: parse_format(format_name).encode(w) for path, w in weights.items()}
    pass_.weights = weights
    pass_.apply(prog)
    (conv,) = prog.functions["main"].find_ops(op_type="conv")
    return conv.weight.op


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_ = PASS_REGISTRY[cetane.lower.constants.PASS]
    monkeypatch.setattr(pass_, "encoded", {})
    monkeypatch.setattr(pass_, "weights", {})


@pytest.mark.parametrize(
    ("format_name", "op_type"),
    [
        ("fp16", "const"),
        ("int8-per-channel", "constexpr_blockwise_shift_scale"),
        ("palette2-kmeans-group4", "constexpr_lut_to_dense"),
    ],
)
def test_replaces_the_constant(format_name: str, op_type: str) -> None:
    op = place(program(), format_name, w=WEIGHT)
    assert op.op_type == op_type
    value = op.outputs[0].val if op_type == "const" else op.materialized_val_inference()
    np.testing.assert_array_equal(value, parse_format(format_name).encode(WEIGHT).decode())


def test_leaves_other_constants_alone() -> None:
    assert place(program()).op_type == "const"


def test_a_weight_that_lowering_lost() -> None:
    with pytest.raises(CetaneError, match="lowering lost the weight gone"):
        place(program(), w=WEIGHT, gone=WEIGHT)
    with pytest.raises(CetaneError, match="lowering lost the weight w"):
        place(program("renamed"), w=WEIGHT)


def test_a_weight_that_lowering_changed() -> None:
    """As folding a scale into it would."""
    with pytest.raises(CetaneError, match="lowering changed the weight w"):
        place(program(), w=WEIGHT * np.float16(2))
