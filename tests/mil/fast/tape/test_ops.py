"""What tapes do with places and forms of operands. `tests/mil/test_ops.py` runs every op."""

from typing import Any

import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from tests.mil.fast.agreement import Build, normal, tape_agrees

from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.fast import FastProgram
from cetane.mil.fast.tape.model import TapeModel


def test_elements_in_any_order(build: Build) -> None:
    """Transposed, cut, and repeated operands of one op."""

    def body(x: Any, y: Any) -> Any:
        transposed = mb.transpose(x=x, perm=[0, 3, 2, 1])
        part = mb.slice_by_index(x=transposed, begin=[0, 1, 0, 0], end=[1, 6, 4, 3])
        back = mb.slice_by_index(x=part, begin=[0, 4, 3, 0], end=[0, 0, 0, 3],
                                 stride=[1, -1, -2, 1], begin_mask=[True] * 4,
                                 end_mask=[True] * 4)  # fmt: skip
        return mb.mul(x=back, y=y), mb.reshape(x=transposed, shape=[2, -1]), mb.silu(x=part)

    path = build({"x": ((1, 3, 4, 7), "fp32"), "y": ((5, 1, 1), "fp32")}, body)
    tape_agrees(path, x=normal(1, 3, 4, 7), y=normal(5, 1, 1))


def test_a_value_that_is_several_outputs(build: Build) -> None:
    """Only one of them can be the place where the value is made. A later op reads it there too."""

    def body(x: Any) -> Any:
        y = mb.relu(x=x)
        turned = mb.transpose(x=y, perm=[1, 0])
        flat = mb.reshape(x=turned, shape=[-1])
        return y, mb.reshape(x=y, shape=[6, 2]), turned, flat, mb.exp(x=y)

    path = build({"x": ((3, 4), "fp32")}, body)
    x = normal(3, 4)
    y, _, turned, flat, _ = tape_agrees(path, x=x)
    np.testing.assert_array_equal(y, np.maximum(x, 0))
    np.testing.assert_array_equal(turned, y.T)
    np.testing.assert_array_equal(flat, y.T.reshape(-1))


def test_a_value_that_changes_in_its_place(build: Build) -> None:
    """A contiguous copy of it is made anew."""

    def body(x: Any, z: Any) -> Any:
        y = mb.exp(x=x)
        first = mb.slice_update(
            x=z, update=mb.transpose(x=y, perm=[1, 0]), begin=[0, 0], end=[4, 3]
        )
        changed = mb.slice_update(x=y, update=mb.relu(x=np.ones((1, 4), np.float32)), begin=[1, 0],
                                  end=[2, 4])  # fmt: skip
        second = mb.slice_update(x=z, update=mb.transpose(x=changed, perm=[1, 0]), begin=[0, 0],
                                 end=[4, 3])  # fmt: skip
        return first, second

    path = build({"x": ((3, 4), "fp32"), "z": ((4, 5), "fp32")}, body)
    x, z = normal(3, 4), normal(4, 5)
    first, second = tape_agrees(path, x=x, z=z)
    changed = np.exp(x)
    np.testing.assert_allclose(first[:, :3], changed.T, rtol=1e-6)
    changed[1] = 1
    np.testing.assert_allclose(second[:, :3], changed.T, rtol=1e-6)


def test_logits_lie_token_by_token(build: Build) -> None:
    """The host wants a row for each token, and gets it without a copy."""
    weight = normal(4096, 32, 1, 1)
    path = build({"x": ((1, 32, 1, 4), "fp32")}, lambda x: mb.conv(x=x, weight=weight))
    x = normal(1, 32, 1, 4)
    (y,) = tape_agrees(path, rtol=1e-3, x=x)
    assert y.reshape(4096, 4).T.flags.c_contiguous


@pytest.mark.parametrize("index", [5, -6, 2**30])
def test_an_index_outside_is_refused(build: Build, index: int) -> None:
    path = build(
        {"x": ((5, 3), "fp32"), "i": ((1,), "int32")}, lambda x, i: mb.gather(x=x, indices=i)
    )
    run = FastProgram(load(path), pack=True).function("main")
    with pytest.raises(CetaneError, match=r"outside|larger"):
        run({"x": normal(5, 3), "i": np.array([index], np.int32)})


@pytest.mark.parametrize("begin", [4, -6])
def test_an_update_outside_is_refused(build: Build, begin: int) -> None:
    def body(x: Any, y: Any, i: Any) -> Any:
        return mb.slice_update(x=x, update=y, begin=i, end=[5])

    shapes = {"x": ((5,), "fp32"), "y": ((2,), "fp32"), "i": ((1,), "int32")}
    path = build(shapes, body)
    given = {"x": normal(5), "y": normal(2)}
    run = FastProgram(load(path), pack=True).function("main")
    with pytest.raises(CetaneError, match="outside"):
        run({**given, "i": np.array([begin], np.int32)})
    (y,) = run({**given, "i": np.array([-2], np.int32)}).values()
    np.testing.assert_array_equal(y, np.concatenate([given["x"][:3], given["y"]]))


def test_what_has_no_instruction_runs_on_onnxruntime(build: Build) -> None:
    path = build({"x": ((2, 3), "fp32")}, lambda x: mb.sin(x=x))
    program = FastProgram(load(path), pack=True)
    assert not isinstance(program.shared("main"), TapeModel)
    x = normal(2, 3)
    np.testing.assert_allclose(next(iter(program.function("main")({"x": x}).values())), np.sin(x),
                               rtol=1e-5)  # fmt: skip
