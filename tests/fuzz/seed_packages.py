"""Small good packages, of the kinds of op that ported models have, and of loops."""

from pathlib import Path
from typing import Any

import numpy as np
from tests.fuzz.fuzzer import Files
from tests.fuzz.packages import MANIFEST, SPECIFICATION, WEIGHTS
from tests.mil.conftest import mb, save_program, types


def make_seeds(folder: Path) -> list[Files]:
    """A package of each of `PROGRAMS`, made in a folder."""
    made = []
    for index, program in enumerate(PROGRAMS):
        place = folder / str(index)
        place.mkdir()
        data = save_program(place, *program) / "Data/com.apple.CoreML"
        weights = data / "weights/weight.bin"
        made.append({
            "model.mlpackage/Manifest.json": MANIFEST.encode(),
            SPECIFICATION: (data / "model.mlmodel").read_bytes(),
            WEIGHTS: weights.read_bytes() if weights.is_file() else b"",
        })  # fmt: skip
    return made


def half(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


def pieces(x: Any) -> Any:
    """An op with several results."""
    parts = mb.split(x=mb.add(x=x, y=half(12)), split_sizes=[4, 8], axis=0)
    return mb.concat(values=[mb.softmax(x=part) for part in parts], axis=0)


def layer(x: Any, past: Any) -> Any:
    """A norm, compressed weights, and attention with a cache."""
    draw = np.random.default_rng(0)
    norm = mb.layer_norm(
        x=mb.concat(values=[x, mb.mul(x=x, y=np.float16(-1))], axis=1), axes=[1],
        epsilon=np.float16(1e-5),
    )  # fmt: skip
    norm = mb.slice_by_index(x=norm, begin=[0, 0, 0, 0], end=[1, 8, 1, 3])
    weights = (
        mb.constexpr_lut_to_dense(
            indices=draw.integers(0, 16, (8, 8, 1, 1)).astype(types.np_uint4_dtype),
            lut=half(1, 1, 1, 1, 16, 1),
        ),
        mb.constexpr_blockwise_shift_scale(
            data=draw.integers(-8, 8, (8, 8, 1, 1)).astype(np.int8), scale=half(8, 1, 1, 1)
        ),
    )
    query, key = (mb.conv(x=norm, weight=w, pad_type="valid") for w in weights)
    rows = mb.transpose(x=mb.reshape(x=query, shape=[1, 2, 4, 3]), perm=[0, 1, 3, 2])
    cache = mb.slice_by_index(x=past, begin=[0, 0, 0, 0], end=[1, 2, 4, 5])
    keys = mb.concat(values=[cache, mb.reshape(x=key, shape=[1, 2, 4, 3])], axis=-1)
    scores = mb.softmax(x=mb.matmul(x=rows, y=keys), axis=-1)
    mixed = mb.matmul(x=scores, y=keys, transpose_y=True)
    turned = mb.transpose(x=mixed, perm=[0, 1, 3, 2])
    return mb.silu(x=mb.reshape(x=turned, shape=[1, 8, 1, 3]))


def stateful(x: Any, cache: Any) -> Any:
    """A state, and ops on indices."""
    before = mb.read_state(input=cache)
    after = mb.slice_update(x=before, update=x, begin=[1, 0], end=[2, 4])
    mb.coreml_update_state(state=cache, value=after)
    hit = mb.one_hot(indices=mb.reduce_argmax(x=after, axis=1), one_hot_vector_size=4)
    spread = mb.tile(x=mb.cast(x=hit, dtype="fp16"), reps=[1, 2])
    return mb.pad(x=mb.gather(x=spread, indices=[2, 0], axis=1), pad=[0, 0, 1, 1])


def loop(x: Any, n: Any) -> Any:
    """A loop, and a branch."""
    end = mb.squeeze(x=n)
    total, _ = mb.while_loop(
        _cond=lambda total, count: mb.less(x=count, y=end),
        _body=lambda total, count: (mb.exp(x=total), mb.add(x=count, y=1)),
        loop_vars=(x, 0),
    )
    positive = mb.greater(x=mb.reduce_sum(x=total, axes=[0], keep_dims=False), y=0.0)
    return mb.cond(pred=positive, _true_fn=lambda: mb.mul(x=total, y=total),
                   _false_fn=lambda: mb.fill(shape=[2], value=0.5))  # fmt: skip


PROGRAMS: list[tuple[Any, ...]] = [
    ({"x": ((12,), "fp16")}, pieces),
    ({"x": ((1, 8, 1, 3), "fp16"), "past": ((2, 2, 4, 5), "fp16")}, layer),
    ({"x": ((1, 4), "fp16")}, stateful, {"cache": ((3, 4), "fp16")}),
    ({"x": ((2,), "fp32"), "n": ((1,), "int32")}, loop),
]
"""Inputs, the function, and states."""
