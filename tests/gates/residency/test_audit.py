"""Placements that follow from other ops, and the verdict about weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.gates.residency.cases import half
from tests.gates.residency.graphs import Model, mb

from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.target import Target

KERNEL = half((64, 64, 1, 1))


def audited(body: Any, folder: Path) -> Audit:
    """The audit of a small program, as if it were a large one."""
    return audit({"model": Model(body).program(folder)}, Target(), ("tiny-program",))


def test_a_body_stays_where_its_loop_is(tmp_path: Path) -> None:
    """One of the two convolutions is in it, so half of the weights are read off the ANE."""

    def goes_on(count: Any, _: Any) -> Any:
        return mb.less(x=count, y=np.int32(3))

    def step(count: Any, value: Any) -> Any:
        return mb.add(x=count, y=np.int32(1)), mb.conv(x=value, weight=KERNEL, name="inner")

    def body(x: Any) -> Any:
        start = mb.reduce_sum(x=mb.cast(x=x, dtype="int32"), keep_dims=False)
        y = mb.conv(x=x, weight=KERNEL, name="outer")
        return mb.while_loop(_cond=goes_on, _body=step, loop_vars=(start, y))[1]

    found = audited(body, tmp_path)
    placed = {op.name: (op.placement, op.rule) for op in found.functions[0].ops}
    assert placed["outer"] == ("ANE", "seen-projections")
    assert placed["inner"] == ("CPU", "loop")
    assert found.reasons == ("50.0% of the weights are read off the ANE, at most 1% may be",)


def test_weights_that_are_read_nobody_knows_where(tmp_path: Path) -> None:
    """Half of them. No rule knows the kind, so nothing else is wrong."""

    def body(x: Any) -> Any:
        return mb.conv(x=mb.conv_transpose(x=x, weight=KERNEL), weight=KERNEL)

    found = audited(body, tmp_path)
    assert not found.functions[0].findings
    (reason,) = found.reasons
    assert reason.startswith("nobody reports where 50.0% of the weights are read (conv_transpose)")


def test_a_program_that_is_too_small(tmp_path: Path) -> None:
    program = Model(lambda x: mb.conv(x=x, weight=KERNEL)).program(tmp_path)
    assert audit({"model": program}, Target()).tiny
    assert not audit({"model": program}, Target(), ("tiny-program",)).tiny
