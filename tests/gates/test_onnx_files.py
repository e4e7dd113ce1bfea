"""The gate of ONNX files refuses those that compute something else than their program."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from cetane.bundle import Bundle
from cetane.gates.onnx_files import judge_onnx
from cetane.mil import load
from cetane.mil.fast.onnx_files import WEIGHTS, export


def one_weight(files: dict[str, Path]) -> None:
    """Turn the signs of the last weight's last rows."""
    path = next(iter(files.values())).parent / WEIGHTS
    data = np.fromfile(path, np.uint16)
    data[-256:] ^= 0x8000
    data.tofile(path)


def two_outputs(files: dict[str, Path]) -> None:
    """Exchange new keys and new values of the widest function."""
    proto = onnx.load(files["prefill"], load_external_data=False)
    swap = {"kv_k_out": "kv_v_out", "kv_v_out": "kv_k_out"}
    for node in proto.graph.node:
        node.output[:] = [swap.get(name, name) for name in node.output]
    onnx.save(proto, files["prefill"])


@pytest.mark.parametrize(
    ("change", "function"), [(None, None), (one_weight, None), (two_outputs, "prefill")]
)
def test_files_of_a_shard(
    change: Callable[[dict[str, Path]], None] | None,
    function: str | None,
    tiny_bundle: Callable[..., Bundle],
    tmp_path: Path,
) -> None:
    bundle = tiny_bundle(verify=None)
    program = load(bundle.shard(bundle.plan.shards[0].name))
    files = export(program, tmp_path, lambda *_: None)
    if change is not None:
        change(files)
    (check,), unjudged = judge_onnx("chunk-00", program, files)
    assert not unjudged
    assert check.passed is (change is None)
    assert check.value < 1e-5 if change is None else check.value > 0.1
    assert function is None or check.name == f"chunk-00: error of {function}"


def test_files_with_states(tiny_bundle: Callable[..., Bundle], tmp_path: Path) -> None:
    """What a function writes into its states is compared too."""
    bundle = tiny_bundle(contract="stateful")
    program = load(bundle.shard(bundle.plan.shards[0].name))
    files = export(program, tmp_path, lambda *_: None)
    (check,), _ = judge_onnx("chunk-00", program, files)
    assert check.passed
    for name, file in files.items():
        proto = onnx.load(file, load_external_data=False)
        kept = next(state for state in program.functions[name].states)
        for node in proto.graph.node:
            if node.output[0] == f"{kept}_out":
                node.input[0] = kept
        onnx.save(proto, file)
    (check,), _ = judge_onnx("chunk-00", program, files)
    assert not check.passed
