"""What a conversion leaves out: collections of garbage, torch's compiler, and slow iterators."""

import gc
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from cetane.lower.patches import indexed, patched, uncollected
from cetane.lower.tracing import without_compiler

RECORDED = """
import sys
import torch
from cetane.lower.tracing import without_compiler
with without_compiler(), torch.device("meta"):
    made = torch.cat([torch.zeros(2), torch.ops.aten.add(torch.zeros(2), 1.0)])
assert made.shape == (4,) and "torch._dynamo" not in sys.modules
import torch._dynamo
assert torch._dynamo.disable.__module__.startswith("torch._dynamo")
"""


def test_no_garbage_is_collected_meanwhile() -> None:
    collections = [generation["collections"] for generation in gc.get_stats()]
    with uncollected():
        with uncollected():
            assert gc.collect() == 0
        assert not gc.isenabled()
        keep = [[number] for number in range(100_000)]
        assert collections == [generation["collections"] for generation in gc.get_stats()]
    del keep
    assert gc.isenabled()
    gc.collect()
    assert gc.get_stats()[2]["collections"] > collections[2]


def branching(x: torch.Tensor, count: int) -> torch.Tensor:
    for _ in range(count):
        x = x + 1 if bool(x.sum() > 0) else -x
    return x


def test_nodes_have_what_torch_says_they_have() -> None:
    """Inputs, outputs, and blocks within blocks."""

    def read(block: Any) -> list[object]:
        return [
            (
                node.kind(),
                [value.debugName() for value in node.inputs()],
                [value.debugName() for value in node.outputs()],
                [read(inner) for inner in node.blocks()],
            )
            for node in block.nodes()
        ]

    graph = torch.jit.script(branching).graph
    plain = read(graph)
    with patched(indexed()):
        assert read(graph) == plain
    assert {"prim::Loop", "prim::If"} <= set(re.findall(r"prim::\w+", str(plain)))


def test_the_compiler_is_loaded_only_later() -> None:
    subprocess.run([sys.executable, "-c", RECORDED], check=True)


def test_a_compiler_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    there = object()
    monkeypatch.setitem(sys.modules, "torch._dynamo", there)  # type: ignore[arg-type]
    with without_compiler():
        assert sys.modules["torch._dynamo"] is there
