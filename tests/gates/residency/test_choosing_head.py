"""A head that chooses, by the rules: nothing of it leaves the ANE, unless it chooses by argmax."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import coremltools as ct
import numpy as np
import torch
from torch import Tensor, nn

from cetane.families.choice import argmax, choose
from cetane.gates.residency.audit import Placed, audit
from cetane.gates.residency.target import Target
from cetane.mil import load
from cetane.schema.interface import choice_block

ROWS, MANY, TOKENS = 5000, 70_000, 4
Choice = Callable[[Tensor], tuple[Tensor, Tensor]]


class Choosing(nn.Module):
    def __init__(self, rows: int, choice: Choice) -> None:
        super().__init__()
        self.rows, self.choice = nn.Conv2d(16, rows, 1, bias=False), choice

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.choice(self.rows(x))


def ops_of(rows: int, choice: Choice, row: type, folder: Path) -> tuple[Placed, ...]:
    """The ops of a head whose rows have a type, as the rules place them."""
    shape = (1, 16, 1, TOKENS)
    traced = torch.jit.trace(Choosing(rows, choice).eval(), torch.zeros(shape))
    model = ct.convert(
        traced, inputs=[ct.TensorType("x", shape, dtype=np.float16)], convert_to="mlprogram",
        outputs=[ct.TensorType("row", dtype=row), ct.TensorType("logit", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
    )  # fmt: skip
    model.save(str(folder / "head.mlpackage"))
    audited = audit({"head": load(folder / "head.mlpackage")}, Target(), ("tiny-program",))
    (function,) = audited.functions
    return function.ops


def test_every_op_is_predicted_on_the_ane(tmp_path: Path) -> None:
    ops = ops_of(ROWS, lambda x: choose(x.flatten(2), choice_block(ROWS)), np.float16, tmp_path)
    assert {(op.kind, op.rule) for op in ops if op.final != "ANE"} == set()
    assert "reduce_max" in {op.kind for op in ops}


def test_argmax_takes_the_ops_of_the_published_head_off_the_ane(tmp_path: Path) -> None:
    """The eight of CoreML-LLM's audit on an iPhone 17 Pro, of 2026-04-13. As there, 16 bits cannot
    hold the number of every row: else a cast comes before the gather."""
    ops = ops_of(MANY, lambda x: argmax(x, 3, 30.0), np.int32, tmp_path)
    assert Counter(op.kind for op in ops if op.final == "CPU") == {
        "mul": 2, "tanh": 1, "squeeze": 2, "reduce_argmax": 1, "expand_dims": 1,
        "gather_along_axis": 1,
    }  # fmt: skip
