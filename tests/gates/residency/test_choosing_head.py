"""A head that chooses, by the rules: nothing of it leaves the ANE."""

from pathlib import Path

import coremltools as ct
import numpy as np
import torch
from torch import Tensor, nn

from cetane.families.choice import choose
from cetane.gates.residency.audit import audit
from cetane.gates.residency.target import Target
from cetane.mil import load
from cetane.schema.interface import choice_block

ROWS, TOKENS = 5000, 4


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Conv2d(64, ROWS, 1, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return choose(self.rows(x).flatten(2), choice_block(ROWS))


def test_every_op_is_predicted_on_the_ane(tmp_path: Path) -> None:
    shape = (1, 64, 1, TOKENS)
    traced = torch.jit.trace(Choosing().eval(), torch.zeros(shape))
    model = ct.convert(
        traced, inputs=[ct.TensorType("x", shape, dtype=np.float16)], convert_to="mlprogram",
        outputs=[ct.TensorType("row", dtype=np.float16), ct.TensorType("logit", dtype=np.float16)],
        minimum_deployment_target=ct.target.iOS18, skip_model_load=True,
    )  # fmt: skip
    model.save(str(tmp_path / "head.mlpackage"))
    audited = audit({"head": load(tmp_path / "head.mlpackage")}, Target(), ("tiny-program",))
    (function,) = audited.functions
    assert {(op.kind, op.rule) for op in function.ops if op.final != "ANE"} == set()
    assert "reduce_max" in {op.kind for op in function.ops}
