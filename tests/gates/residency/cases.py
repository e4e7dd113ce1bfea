"""For every rule a graph that has the pattern, and a near miss that has not."""

from __future__ import annotations

from typing import Any

import coremltools.optimize.coreml as cto
import numpy as np
from coremltools.converters.mil.mil import types
from tests.gates.residency.graphs import Model, conv, ct, mb, weight

HALF = np.float16
PHONE = {"chip": "a19-pro"}
STATE = {"kv": ((1, 8, 64, 256), "fp16")}


def half(shape: tuple[int, ...], value: float = 0.5) -> Any:
    return np.full(shape, value, HALF)


def of(shape: tuple[int, ...], dtype: str = "fp16", **others: Any) -> dict[str, Any]:
    """The inputs of a model: x, and others by name."""
    return {"inputs": {"x": (shape, dtype), **others}}


def many_convs(x: Any, count: int, form: str) -> Any:
    for _ in range(count):
        x = conv(x, x.shape[1], form)
    return x


# -- shapes


def to_rank_5(x: Any) -> Any:
    x = mb.reshape(x=x, shape=[1, 2, 2, 2, 64])
    return mb.transpose(x=x, perm=[0, 1, 2, 4, 3])


def to_rank_6(block: Any) -> None:
    """One more axis of 1 for every result: coremltools refuses to write it."""
    for op in block.operations:
        tensor = op.outputs[0].type.tensorType
        if tensor.rank == 5:
            tensor.rank = 6
            tensor.dimensions.add().constant.size = 1
        if op.type == "const" and len(op.attributes["val"].immediateValue.tensor.ints.values) == 5:
            sizes = op.attributes["val"]
            values = sizes.immediateValue.tensor.ints.values
            values.append(5 if sorted(values) == list(range(5)) else 1)
            sizes.type.tensorType.dimensions[0].constant.size = 6
            tensor.dimensions[0].constant.size = 6


def slice_last(x: Any, begin: int) -> Any:
    return mb.slice_by_index(x=x, begin=[0, 0, 0, begin], end=[1, 64, 1, begin + 4])


def halves_norm(x: Any) -> Any:
    return mb.layer_norm(x=x, axes=[1], epsilon=HALF(1e-3))


def tiled(x: Any, reps: Any) -> Any:
    return mb.relu(x=mb.tile(x=x, reps=reps))


REPEATS = of((1, 64, 1, 8), reps=((4,), "int32"))
SHAPES = ((1, 64, 1, 8), (1, 64, 1, 16))
SHAPE_CASES = {
    "rank-above-5": (Model(to_rank_5, edit=to_rank_6), Model(to_rank_5)),
    "non-default-shape": (
        Model(lambda x: mb.relu(x=x), ranges={3: (1, 8)}),
        Model(lambda x: mb.relu(x=x)),
    ),
    "computed-shape": (
        Model(tiled, **REPEATS),
        Model(tiled, **REPEATS, ranges={3: (1, 8)}),  # perhaps the input's own size
    ),
    "enumerated-layer-norm": (
        Model(halves_norm, enumerated=SHAPES),
        Model(lambda x: mb.relu(x=x), enumerated=SHAPES),
    ),
    "singleton-last-axis": (
        Model(lambda x: mb.relu(x=x), **of((1, 2048, 8, 1))),
        Model(lambda x: mb.relu(x=x), **of((1, 2048, 1, 8))),
    ),
    "unaligned-last-axis": (
        Model(lambda x: mb.relu(x=x), **of((1, 64, 8, 250))),
        Model(lambda x: mb.relu(x=x), **of((1, 64, 8, 256))),
    ),
    "axis-limit": (Model(lambda x: conv(x, 70_016)), Model(lambda x: conv(x, 65_536))),
    "late-slice": (
        Model(lambda x: slice_last(x, 4), chip="m1"),
        Model(lambda x: slice_last(x, 0), chip="m1"),
    ),
}

# -- selection

TABLE = {"y": ((1,), "int32")}
SELECTION_CASES = {
    "argmax": (
        Model(lambda x: mb.reduce_argmax(x=x, axis=1)),
        Model(lambda x: mb.reduce_max(x=x, axes=[1])),
    ),
    "wide-topk": (
        Model(lambda x: mb.topk(x=x, k=4, axis=1), **of((1, 5000))),
        Model(lambda x: mb.topk(x=x, k=4, axis=1), **of((1, 128))),
    ),
    "narrow-index": (
        Model(lambda x: mb.topk(x=x, k=4, axis=1, output_indices_dtype="uint16"),
              **of((1, 70_000))),
        Model(lambda x: mb.topk(x=x, k=4, axis=1, output_indices_dtype="int32"),
              **of((1, 70_000))),
    ),
    "gather": (
        Model(lambda x, y: mb.gather(x=x, indices=y, axis=3), **of((1, 64, 1, 8), **TABLE)),
        Model(lambda x: slice_last(x, 0)),
    ),
    "weight-gather": (
        Model(lambda y: mb.gather(x=weight(16, 1 << 18), indices=y, axis=0), inputs=TABLE),
        Model(lambda y: mb.gather(x=weight(16, 1 << 10), indices=y, axis=0), inputs=TABLE),
    ),
    "dynamic-gather-nd": (
        Model(
            lambda x, i: mb.gather_nd(x=x, indices=mb.non_zero(x=i)),
            **of((4, 8), i=((4, 8), "fp16")), **PHONE,
        ),
        Model(
            lambda x, i: mb.gather_nd(x=x, indices=i), **of((4, 8), i=((3, 2), "int32")), **PHONE,
        ),
    ),
    "cumsum": (
        Model(lambda x: mb.cumsum(x=x, axis=3)),
        Model(lambda x: mb.reduce_sum(x=x, axes=[3])),
    ),
}  # fmt: skip

# -- operations


def repeated(x: Any) -> Any:
    def goes_on(count: Any, _: Any) -> Any:
        return mb.less(x=count, y=np.int32(3))

    def step(count: Any, value: Any) -> Any:
        return mb.add(x=count, y=np.int32(1)), mb.relu(x=value)

    start = mb.reduce_sum(x=mb.cast(x=x, dtype="int32"), keep_dims=False)
    return mb.while_loop(_cond=goes_on, _body=step, loop_vars=(start, x))[1]


def depthwise(x: Any, form: str, groups: int = 64) -> Any:
    return mb.conv(x=x, weight=weight(64, 64 // groups, 1, 3, form=form), groups=groups)


def kernel(x: Any, taps: int) -> Any:
    return mb.conv(x=x, weight=weight(64, 64, 1, taps), pad_type="same")


def fused(q: Any, k: Any, v: Any) -> Any:
    return mb.scaled_dot_product_attention(query=q, key=k, value=v)


def qkv(tokens: int) -> dict[str, Any]:
    return {"inputs": {name: ((1, 16, tokens, 64), "fp16") for name in "qkv"}}


def quantized(x: Any) -> Any:
    stored = mb.quantize(input=x, scale=HALF(0.1), output_dtype="int8")
    return mb.dequantize(input=stored, scale=HALF(0.1))


def lstm(x: Any) -> Any:
    zeros = half((1, 16), 0)
    matrix = {name: half((64, size)) for name, size in (("weight_ih", 64), ("weight_hh", 16))}
    return mb.lstm(x=x, initial_h=zeros, initial_c=zeros, bias=half((64,)), **matrix)


def product(left: tuple[int, ...], right: tuple[int, ...], **others: Any) -> Model:
    inputs = {"x": (left, "fp16"), "y": (right, "fp16")}
    return Model(lambda x, y: mb.matmul(x=x, y=y), inputs=inputs, **others)


def written(tokens: int) -> Model:
    """A cache `(1, 8, 64, 512)` with some columns written by a one-hot mask."""
    inputs = {
        "cache": ((1, 8, 64, 512), "fp16"), "keep": ((1, 1, 1, 512), "fp16"),
        "x": ((1, 8, 64, tokens), "fp16"), "y": ((1, 1, tokens, 512), "fp16"),
    }  # fmt: skip
    return Model(
        lambda cache, keep, x, y: mb.add(x=mb.mul(x=cache, y=keep), y=mb.matmul(x=x, y=y)),
        inputs=inputs, **PHONE,
    )  # fmt: skip


OPERATION_CASES = {
    "loop": (Model(repeated), Model(lambda x: mb.relu(x=mb.relu(x=x)))),
    "reduction-depth": (
        Model(lambda x: conv(x, 64), **of((1, 20_480, 1, 1))),
        Model(lambda x: conv(x, 64), **of((1, 16_384, 1, 1))),
    ),
    "rank-2-linear": (
        Model(lambda x: mb.linear(x=x, weight=weight(64, 1024)), **of((1, 1024))),
        Model(lambda x: mb.linear(x=x, weight=weight(64, 1024)), **of((1, 1, 1024))),
    ),
    "depthwise-conv": (
        Model(lambda x: depthwise(x, "fp16")),
        Model(lambda x: depthwise(x, "fp16", groups=2)),
    ),
    "palettized-depthwise-conv": (
        Model(lambda x: depthwise(x, "lut4"), chip="a18"),
        Model(lambda x: depthwise(x, "fp16"), chip="a18"),
    ),
    "large-kernel": (
        Model(lambda x: kernel(x, 15), **of((1, 64, 1, 64))),
        Model(lambda x: kernel(x, 13), **of((1, 64, 1, 64))),
    ),
    "runtime-weights": (
        Model(
            lambda x, w: mb.conv(x=x, weight=w),
            **of((1, 64, 1, 8), w=((128, 64, 1, 1), "fp16")),
        ),
        Model(lambda x: conv(x, 128)),
    ),
    "small-sdpa": (Model(fused, **qkv(64)), Model(fused, **qkv(2048))),
    "recurrent": (
        Model(lstm, **of((4, 1, 64))),
        Model(lambda x: mb.linear(x=x, weight=weight(64, 64)), **of((4, 1, 64))),
    ),
    "matmul-scatter": (
        written(8), product((1, 8, 512, 16), (1, 8, 16, 64), **PHONE),  # a score of small heads
    ),
    "wide-matmul-scatter": (written(64), written(4)),
    "activation-quantization": (
        Model(quantized, **PHONE), Model(lambda x: conv(x, 64, "int8"), **PHONE),
    ),
    "activation-quantization-mac": (Model(quantized), Model(lambda x: conv(x, 64, "int8"))),
    "quantized-product": (
        Model(lambda x: mb.mul(x=quantized(x), y=quantized(mb.relu(x=x)))),
        Model(lambda x: mb.mul(x=quantized(x), y=mb.relu(x=x))),
    ),
    "contraction-notch": (
        Model(lambda x: conv(x, 4096), **of((1, 2048, 1, 1))),
        Model(lambda x: conv(x, 4096), **of((1, 2000, 1, 1))),
    ),
}  # fmt: skip

# -- weights


def in_form(form: str, **others: Any) -> Model:
    return Model(lambda x: conv(x, 128, form), **others)


def blocks_and_state(x: Any, kv: Any) -> Any:
    keep(kv)
    return many_convs(x, 97, "int4-block32")


def keep(state: Any) -> Any:
    """Write a column to a state, as a cache that stays on the ANE is written."""
    return mb.coreml_update_state(
        state=state,
        value=mb.slice_update(
            x=mb.read_state(input=state), update=half((1, 8, 64, 1)),
            begin=[0, 0, 0, 3], end=[1, 8, 64, 4],
        ),
    )  # fmt: skip


def scaled(x: Any, vector: int = 1) -> Any:
    """A palette of single weights or of vectors, with scales on top."""
    dense = mb.constexpr_lut_to_dense(
        indices=np.zeros((64 // vector, 64, 1, 1), np.uint8), lut=half((1, 1, 1, 1, 256, vector)),
        vector_axis=0 if vector > 1 else None,
    )  # fmt: skip
    stored = mb.constexpr_blockwise_shift_scale(data=dense, scale=half((64, 1, 1, 1)))
    return mb.conv(x=x, weight=stored)


def sparse(x: Any) -> Any:
    mask = np.tile(np.array([1, 0], np.uint8), 64 * 32).reshape(64, 64, 1, 1)
    mask = mask.astype(types.nptype_from_builtin(types.uint1))
    stored = mb.constexpr_sparse_to_dense(nonzero_data=half((64 * 32,)), mask=mask)
    return mb.conv(x=x, weight=stored)


def palettes_and_state(x: Any, kv: Any) -> Any:
    keep(kv)
    return conv(x, 128, "lut4")


WEIGHT_CASES = {
    "int4-per-block": (in_form("int4-block32"), in_form("lut4")),
    "int4-per-block-large": (
        Model(blocks_and_state, states=STATE),
        Model(lambda x: many_convs(x, 97, "int4-block32")),
    ),
    "int4-per-channel": (in_form("int4"), in_form("int8")),
    "int8-per-block": (in_form("int8-block32"), in_form("int8")),
    "int8-linear": (in_form("int8"), in_form("lut8")),
    "int8-folded": (in_form("int8", chip="m1-max"), in_form("int8", chip="m2")),
    "palette-per-block": (in_form("lut4-block"), in_form("lut4")),
    "vector-palette": (in_form("lut8-pairs"), in_form("lut8")),
    "palette-per-channel": (Model(lambda x: conv(x, 128, "lut4-channel")), in_form("lut4")),
    "scaled-palette": (Model(scaled), in_form("lut8")),
    "int8-palette": (in_form("lut8-int8"), in_form("lut8")),
    "sparse-weights": (Model(sparse), in_form("fp16")),
    "stateful-palette4": (Model(palettes_and_state, states=STATE), in_form("lut4")),
}

# -- weights as coremltools compresses them


def palettes(joint: bool = False, **options: Any) -> Model:
    """A convolution of 64 to 128 channels in 4-bit palettes; with `joint`, of int8 entries."""
    four = cto.OpPalettizerConfig(mode="uniform", nbits=4, weight_threshold=0, **options)
    eight = cto.OpLinearQuantizerConfig(
        mode="linear_symmetric", granularity="per_tensor", weight_threshold=0
    )

    def compress(model: Any) -> Any:
        model = cto.palettize_weights(model, cto.OptimizationConfig(global_config=four))
        if not joint:
            return model
        config = cto.OptimizationConfig(global_config=eight)
        return cto.linear_quantize_weights(model, config, joint_compression=True)

    values = np.random.default_rng(0).standard_normal((128, 64, 1, 1)).astype(HALF)
    return Model(lambda x: mb.conv(x=x, weight=values), compress=compress)


IN_GROUPS = {"granularity": "per_grouped_channel", "group_size": 32}
COMPRESSED_CASES = (
    (palettes(), set()),
    (palettes(**IN_GROUPS), set()),
    (palettes(enable_per_channel_scale=True), {"scaled-palette"}),
    (palettes(enable_per_channel_scale=True, **IN_GROUPS), {"scaled-palette"}),
    (palettes(joint=True, **IN_GROUPS), {"int8-palette"}),
)
"""Models, and the rules about weights that they break."""

# -- states


def kept(x: Any, *states: Any) -> Any:
    for state in states:
        keep(state)
    return mb.relu(x=x)


def several(count: int) -> dict[str, Any]:
    return {f"s{i}": ((1, 8, 64, 256), "fp16") for i in range(count)}


def one_kept(x: Any, kv: Any) -> Any:
    return kept(x, kv)


def two_kept(x: Any, s0: Any, s1: Any) -> Any:
    return kept(x, s0, s1)


def history_conv(x: Any, kv: Any) -> Any:
    past = mb.read_state(input=kv)
    joined = mb.concat(values=[past, x], axis=3)
    mb.coreml_update_state(state=kv, value=half((1, 64, 1, 32)))
    return conv(joined, 64)


def history_tensor(x: Any, past: Any) -> Any:
    return conv(mb.concat(values=[past, x], axis=3), 64)


def shifted(x: Any, kv: Any) -> Any:
    rest = mb.slice_by_index(x=mb.read_state(input=kv), begin=[0, 0, 0, 1], end=[1, 8, 64, 256])
    mb.coreml_update_state(state=kv, value=mb.concat(values=[rest, half((1, 8, 64, 1))], axis=3))
    return mb.relu(x=x)


def blended(x: Any, kv: Any) -> Any:
    old = mb.mul(x=mb.read_state(input=kv), y=half((1, 1, 1, 256)))
    mb.coreml_update_state(state=kv, value=mb.add(x=old, y=half((1, 8, 64, 1))))
    return mb.relu(x=x)


def viewed(x: Any, kv: Any) -> Any:
    flat = mb.reshape(x=mb.read_state(input=kv), shape=[8, 256, 64])
    turned = mb.transpose(x=flat, perm=[0, 2, 1])
    again = mb.reshape(x=turned, shape=[1, 8, 64, 256])
    mb.coreml_update_state(state=kv, value=mb.add(x=again, y=HALF(1)))
    return mb.relu(x=x)


def state_slice(x: Any, kv: Any) -> Any:
    new = keep(kv)
    part = mb.slice_by_index(x=new, begin=[0, 0, 0, 0], end=[1, 8, 64, 32])
    return conv(x, 64), part


def wide_update(columns: int) -> Any:
    def body(x: Any, kv: Any) -> Any:
        value = mb.slice_update(
            x=mb.read_state(input=kv), update=half((1, 8, 64, columns)),
            begin=[0, 0, 0, 0], end=[1, 8, 64, columns],
        )  # fmt: skip
        mb.coreml_update_state(state=kv, value=value)
        return mb.relu(x=x)

    return body


def conv_and_two(x: Any, s0: Any, s1: Any) -> Any:
    keep(s0)
    keep(s1)
    return conv(x, 64)


STATE_CASES = {
    "three-states": (
        Model(lambda x, s0, s1, s2: kept(x, s0, s1, s2), states=several(3)),
        Model(two_kept, states=several(2)),
    ),
    "convolution-state": (
        Model(history_conv, states={"kv": ((1, 64, 1, 32), "fp16")}),
        Model(history_tensor, **of((1, 64, 1, 8), past=((1, 64, 1, 32), "fp16"))),
    ),
    "state-last-axis": (
        Model(
            lambda x, kv: mb.relu(x=mb.add(x=mb.read_state(input=kv), y=HALF(1))),
            states={"kv": ((1, 8, 64, 270), "fp16")},
        ),
        Model(one_kept, states=STATE),
    ),
    "state-shift": (Model(shifted, states=STATE), Model(one_kept, states=STATE)),
    "state-blend": (Model(blended, states=STATE), Model(one_kept, states=STATE)),
    "state-view": (Model(viewed, states=STATE), Model(blended, states=STATE)),
    "state-output": (
        Model(state_slice, states=STATE),
        Model(state_slice, states=STATE, **of((1, 64, 1, 1))),
    ),
    "two-states-verify": (
        Model(conv_and_two, states=several(2), functions=2, **PHONE),
        Model(conv_and_two, states=several(2), **PHONE),
    ),
    "wide-state-update": (
        Model(wide_update(128), states=STATE), Model(wide_update(32), states=STATE),
    ),
    "state-flexible": (
        Model(one_kept, states=STATE, enumerated=SHAPES),
        Model(lambda x: mb.relu(x=x), enumerated=SHAPES),
    ),
    "state-range": (
        Model(one_kept, states=STATE, ranges={3: (1, 8)}), Model(one_kept, states=STATE),
    ),
    "states": (Model(one_kept, states=STATE), Model(lambda x: mb.relu(x=x))),
}  # fmt: skip

# -- numerics


def fp32_softmax(x: Any) -> Any:
    wide = mb.cast(x=mb.relu(x=x), dtype="fp32")
    return mb.relu(x=mb.cast(x=mb.softmax(x=wide, axis=1), dtype="fp16"))


def mean_square(x: Any, scale: float | None) -> Any:
    x = x if scale is None else mb.mul(x=x, y=HALF(scale))
    return mb.reduce_mean(x=mb.mul(x=x, y=x), axes=[1], keep_dims=True)


def root(x: Any, epsilon: float) -> Any:
    mean = mb.reduce_mean(x=mb.square(x=x), axes=[1], keep_dims=True)
    return mb.rsqrt(x=mb.add(x=mean, y=HALF(epsilon)), epsilon=HALF(0))


NUMERIC_CASES = {
    "fp32-island": (
        Model(fp32_softmax), Model(lambda x: mb.softmax(x=mb.relu(x=x), axis=1)),
    ),
    "fp32-boundary": (
        Model(lambda x: mb.relu(x=mb.cast(x=x, dtype="fp16")), **of((1, 64, 1, 8), "fp32")),
        Model(lambda x: mb.relu(x=x)),
    ),
    "int8-input": (
        Model(
            lambda x: mb.relu(x=mb.cast(x=x, dtype="fp16")),
            **of((1, 64, 1, 8), "int8"),
            target=ct.target.iOS26,
        ),
        Model(lambda x: mb.relu(x=mb.cast(x=mb.cast(x=x, dtype="int8"), dtype="fp16"))),
    ),
    "infinite-mask": (
        Model(lambda x: mb.add(x=x, y=half((1, 1, 1, 8), -np.inf))),
        Model(lambda x: mb.add(x=x, y=half((1, 1, 1, 8), -4e4))),
    ),
    "fp16-squares": (
        Model(lambda x: mean_square(x, None)), Model(lambda x: mean_square(x, 0.03)),
    ),
    "layer-norm-variance": (
        Model(halves_norm, os=16), Model(halves_norm, os=17),
    ),
    "subnormal-epsilon": (
        Model(lambda x: root(x, 1e-6), **PHONE), Model(lambda x: root(x, 1e-3), **PHONE),
    ),
    "softplus": (
        Model(lambda x: mb.softplus(x=mb.minimum(x=x, y=HALF(11)))),
        Model(lambda x: mb.softplus(x=mb.minimum(x=x, y=HALF(10)))),
    ),
    "log-sum-exp": (
        Model(lambda x: mb.reduce_log_sum_exp(x=x, axes=[1])),
        Model(lambda x: mb.log(x=mb.reduce_sum(x=mb.exp(x=x), axes=[1]))),
    ),
}  # fmt: skip

# -- programs


def wide(count: int, form: str = "fp16") -> Model:
    """Convolutions of 8192 to 8192 channels: 134.2 MB each in fp16."""
    return Model(lambda x: many_convs(x, count, form), **of((1, 8192, 1, 1)))


def whole_model(count: int) -> Model:
    """Layers with attention, and a head of 151936 outputs."""

    def body(x: Any) -> Any:
        x = mb.softmax(x=many_convs(x, count, "int8"), axis=1)
        return conv(x, 151_936, "int8")

    return Model(body, **of((1, 4096, 1, 1)))


def linears(count: int, inner: int) -> Model:
    def body(x: Any) -> Any:
        for index in range(count):
            sizes = (inner, 1024) if index % 2 == 0 else (1024, inner)
            x = mb.linear(x=x, weight=weight(*sizes))
        return x

    return Model(body, **of((1, 1, 1024)))


def repeat(block: Any, count: int) -> None:
    """More ops like the last one."""
    *_, last = block.operations
    for index in range(count):
        op = block.operations.add()
        op.CopyFrom(last)
        op.outputs[0].name = f"more-{index}"


def long_program(count: int) -> Model:
    return Model(lambda x: mb.relu(x=x), edit=lambda block: repeat(block, count - 1), **PHONE)


PROGRAM_CASES = {
    "newer-system": (
        Model(lambda x: conv(x, 64), target=ct.target.iOS26, os=18),
        Model(lambda x: conv(x, 64), target=ct.target.iOS26, os=26),
    ),
    "program-constants": (wide(17), wide(15)),
    "program-constants-risky": (wide(8), wide(7)),
    "monolith": (whole_model(40), whole_model(25)),
    "phone-constants": (
        Model(wide(8).body, **of((1, 8192, 1, 1)), **PHONE),
        Model(wide(7).body, **of((1, 8192, 1, 1)), **PHONE),
    ),
    "tiny-program": (Model(lambda x: conv(x, 64)), wide(1)),
    "lone-linear": (linears(3, 4096), linears(3, 8192)),
    "regions": (
        Model(lambda x: conv(fp32_softmax(conv(x, 2048)), 2048)),
        Model(lambda x: mb.reduce_argmax(x=many_convs(conv(x, 2048), 1, "fp16"), axis=1)),
    ),
    "op-count": (long_program(6001), long_program(5999)),
}

CASES = (
    SHAPE_CASES | SELECTION_CASES | OPERATION_CASES | WEIGHT_CASES | STATE_CASES | NUMERIC_CASES
    | PROGRAM_CASES
)  # fmt: skip
