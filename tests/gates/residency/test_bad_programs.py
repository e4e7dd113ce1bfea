"""Packages whose ops are not what they should be: one line of an error, or an audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gates.residency.cases import CASES, conv
from tests.gates.residency.graphs import Model, mb

from cetane.errors import CetaneError
from cetane.gates.residency.audit import audit
from cetane.gates.residency.target import Target
from cetane.mil import load
from cetane.mil.proto import model_message

MIXED = ["argmax", "wide-topk", "gather", "int4-per-block", "scaled-palette", "state-shift",
         "activation-quantization", "fp16-squares", "late-slice", "small-sdpa",
         "palette-per-block"]  # fmt: skip


def damage(spec: Any, random: np.random.Generator) -> None:
    """Take an input, a result, a type or an axis away from some op."""
    function = spec.mlProgram.functions["main"]
    ops = function.block_specializations[function.opset].operations
    op = ops[random.integers(len(ops))]
    match random.integers(5):
        case 0 if op.inputs:
            del op.inputs[str(random.choice(sorted(op.inputs)))]
        case 1 if op.inputs:
            op.inputs[str(random.choice(sorted(op.inputs)))].Clear()
        case 2 if op.outputs:
            del op.outputs[:]
        case 3 if op.outputs and op.outputs[0].type.tensorType.dimensions:
            del op.outputs[0].type.tensorType.dimensions[:]
        case _:
            op.type = str(random.choice(["conv", "matmul", "topk", "slice_update", "linear"]))


@pytest.mark.parametrize("id", MIXED)
def test_damaged_ops(id: str, tmp_path: Path) -> None:
    CASES[id][0].program(tmp_path)
    file = tmp_path / "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"
    whole = file.read_bytes()
    refused = 0
    for seed in range(25):
        spec = model_message().FromString(whole)
        damage(spec, np.random.default_rng(seed))
        file.write_bytes(spec.SerializeToString())
        try:
            audit({"model": load(tmp_path / "model.mlpackage")}, Target())
        except CetaneError as error:
            refused += 1
            assert "\n" not in error.message
    assert refused < 25


def test_a_long_tail(tmp_path: Path) -> None:
    """Thousands of ops in a row are no deep recursion."""

    def repeat(block: Any) -> None:
        tanh = next(op for op in block.operations if op.type == "tanh")
        pick = next(op for op in block.operations if op.type == "reduce_argmax")
        for index in range(3000):
            op = block.operations.add()
            op.CopyFrom(tanh)
            op.inputs["x"].arguments[0].name = f"long-{index - 1}" if index else "cap"
            op.outputs[0].name = f"long-{index}"
        pick.inputs["x"].arguments[0].name = "long-2999"
        last = pick.SerializeToString()
        block.operations.remove(pick)
        block.operations.add().ParseFromString(last)

    def body(x: Any) -> Any:
        return mb.reduce_argmax(x=mb.tanh(x=conv(x, 2048), name="cap"), axis=1)

    model = Model(body, inputs={"x": ((1, 2048, 1, 8), "fp16")}, edit=repeat)
    (found,) = audit({"model": model.program(tmp_path)}, Target()).functions
    assert found.count("CPU") == 3002


def test_no_functions_and_no_program(tmp_path: Path) -> None:
    Model(lambda x: mb.relu(x=x)).program(tmp_path)
    file = tmp_path / "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"
    file.write_bytes(b"")
    with pytest.raises(CetaneError, match="holds no ML program"):
        load(tmp_path / "model.mlpackage")
    manifest = tmp_path / "model.mlpackage/Manifest.json"
    manifest.write_text(json.dumps({"rootModelIdentifier": "x", "itemInfoEntries": {}}))
    with pytest.raises(CetaneError, match="not a package manifest"):
        load(tmp_path / "model.mlpackage")
