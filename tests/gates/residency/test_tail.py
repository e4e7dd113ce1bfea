"""Which neighbours go with an op that leaves the ANE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.gates.residency.cases import half
from tests.gates.residency.graphs import Model, conv, mb

from cetane.gates.residency.audit import audit
from cetane.gates.residency.target import Target

WIDE = {"x": ((1, 2048, 1, 8), "fp16")}


def off_ane(body: Any, folder: Path, inputs: Any = None) -> list[str]:
    """Names of the ops on the CPU."""
    program = Model(body, inputs=inputs or WIDE).program(folder)
    (found,) = audit({"model": program}, Target()).functions
    return [op.name for op in found.ops if op.placement == "CPU"]


def test_what_only_the_tail_reads_goes_with_it(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        y = conv(x, 2048, name="kept")
        y = mb.mul(x=y, y=half((), 2), name="scale")
        return mb.reduce_argmax(x=mb.tanh(x=y, name="cap"), axis=1, name="pick")

    assert off_ane(body, tmp_path) == ["scale", "cap", "pick"]


def test_what_others_read_stays(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        y = mb.tanh(x=conv(x, 2048), name="cap")
        return mb.reduce_argmax(x=y, axis=1, name="pick"), conv(y, 64)

    assert off_ane(body, tmp_path) == ["pick"]


def test_an_output_stays(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        y = mb.tanh(x=conv(x, 2048), name="cap")
        return mb.reduce_argmax(x=y, axis=1, name="pick"), y

    assert off_ane(body, tmp_path) == ["pick"]


def test_a_lookup_in_front_does_not_drag_the_body(tmp_path: Path) -> None:
    def body(x: Any, i: Any) -> Any:
        rows = mb.gather(x=x, indices=i, axis=3, name="look")
        turned = mb.transpose(x=rows, perm=[0, 1, 3, 2], name="turn")
        return conv(conv(turned, 2048), 2048)

    assert off_ane(body, tmp_path, {**WIDE, "i": ((8,), "int32")}) == ["look"]


def test_what_follows_to_the_output_goes(tmp_path: Path) -> None:
    def body(x: Any, i: Any) -> Any:
        rows = mb.gather(x=conv(conv(x, 2048), 2048), indices=i, axis=3, name="look")
        return mb.squeeze(x=mb.mul(x=rows, y=half((), 2), name="twice"), axes=[2], name="flat")

    found = off_ane(body, tmp_path, {**WIDE, "i": ((8,), "int32")})
    assert found == ["look", "twice", "flat"]


def test_a_sum_of_two_tensors_stays(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        y = mb.add(x=conv(x, 2048), y=x, name="sum")
        return mb.reduce_argmax(x=y, axis=1, name="pick")

    assert off_ane(body, tmp_path) == ["pick"]


def test_neighbours_take_the_rule_that_drags(tmp_path: Path) -> None:
    """A worse rule also hits the leader: its indices are too narrow."""

    def body(x: Any) -> Any:
        values, _ = mb.topk(x=x, k=4, axis=1, output_indices_dtype="uint16", name="pick")
        return mb.tanh(x=values, name="cap")

    program = Model(body, inputs={"x": ((1, 70_000), "fp16")}).program(tmp_path)
    (found,) = audit({"model": program}, Target(), ("tiny-program",)).functions
    assert [(op.name, op.placement, op.rule) for op in found.ops] == [
        ("pick", "wrong", "narrow-index"), ("cap", "CPU", "wide-topk"),
    ]  # fmt: skip


def test_cumsum_drags_nothing(tmp_path: Path) -> None:
    def body(x: Any) -> Any:
        return mb.tanh(x=mb.cumsum(x=conv(x, 2048), axis=3, name="run"))

    assert off_ane(body, tmp_path) == ["run"]
