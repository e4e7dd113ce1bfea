"""The audits that were published with the first ports: our tables are theirs.

Sources: ane-book (experiments 26 to 35, journal 003 to 102, research on INT4 and on scale; M4 Max)
and the audit in CoreML-LLM's experiments log of 2026-04-13 (iPhone 17 Pro).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.gates.residency.cases import half, keep, many_convs, of
from tests.gates.residency.graphs import Model, conv, mb, weight
from tests.gates.residency.shards import lowered

from cetane.gates.residency.audit import FunctionAudit, audit
from cetane.gates.residency.target import Target
from cetane.mil.program import Program

KV = ((1, 8, 128, 2048), "fp16")


def placed(program: Program, chip: str = "m4-max") -> FunctionAudit:
    """The one function of a program, at the shape it was made for."""
    return audit({"shard": program}, Target(chip)).functions[0]


def convs(program: Program) -> tuple[int, int, int]:
    """conv_total, conv_ane, conv_non_ane."""
    table = placed(program).table()
    return table["conv_total"], table["conv_ane"], table["conv_non_ane"]


@pytest.mark.parametrize(
    ("recipe", "shard", "expected"),
    [
        ("zaya-exp29-probe", "attn-00", 2),  # experiment 29: 4.2 MB
        ("zaya-exp34", "moe-00", 36),  # experiments 29 and 34: int8, 202 MB
        ("zaya-exp35", "moe-00", 36),  # experiment 35: 4-bit palettes, 101 MB
        ("zaya-exp29-probe", "head-0", 1),
    ],
)
def test_zaya_as_cetane_lowers_it(recipe: str, shard: str, expected: int, tmp_path: Path) -> None:
    program = lowered(recipe, shard, tmp_path)
    assert convs(program) == (expected, expected, 0)
    table = placed(program).table()
    assert table["ops_ane"] == table["ops"]


def attention(hidden: int, projections: tuple[tuple[int, int], ...], form: str) -> Any:
    """A stateful attention's convolutions, `(inputs, outputs)` each, in a chain; its cache."""

    def body(x: Any, k: Any, v: Any) -> Any:
        keys, values = keep_last(k), keep_last(v)
        for inputs, outputs in projections:
            x = mb.slice_by_index(x=x, begin=[0] * 4, end=[1, inputs, 1, 1])
            x = mb.conv(x=x, weight=weight(outputs, inputs, 1, 1, form=form))
        scores = mb.softmax(x=mb.matmul(x=half((1, 8, 1, 128)), y=keys), axis=3)
        return x, mb.matmul(x=scores, y=values, transpose_y=True)

    states = {"k": KV, "v": KV}
    return Model(body, inputs={"x": ((1, hidden, 1, 1), "fp16")}, states=states)


def keep_last(state: Any) -> Any:
    value = mb.slice_update(
        x=mb.read_state(input=state), update=half((1, 8, 128, 1)),
        begin=[0, 0, 0, 3], end=[1, 8, 128, 4],
    )  # fmt: skip
    return mb.coreml_update_state(state=state, value=value)


ZAYA_ATTENTION = ((2048, 1024), (1024, 256), (256, 256), (256, 2048))
ZAYA_PROBE = ((2048, 1024), (1024, 2048))


@pytest.mark.parametrize(
    ("projections", "form"),
    [(ZAYA_ATTENTION, "fp16"), (ZAYA_PROBE, "int8"), (ZAYA_PROBE, "fp16")],
    ids=["experiment 30", "experiment 29", "experiment 31"],
)
def test_zaya_attention(projections: Any, form: str, tmp_path: Path) -> None:
    """4 of 4, and 2 of 2, in shards of 4 to 8 MB."""
    count = len(projections)
    assert convs(attention(2048, projections, form).program(tmp_path)) == (count, count, 0)


PHI = ((3072, 5120), (3072, 3072), (3072, 16384), (8192, 3072))
"""Phi-4-mini's four convolutions a layer: 100.7 million weights."""


@pytest.mark.parametrize(
    ("layers", "on_ane"),
    [(1, True), (6, True), (12, True), (20, True), (24, False)],
)
def test_phi(layers: int, on_ane: bool, tmp_path: Path) -> None:
    """Journal 003 to 055: 20 layers of int8, 2015.8 MB, are in; 24, 2.3 GiB, are out."""

    def body(x: Any, k: Any, v: Any) -> Any:
        keep_last(k)
        keep_last(v)
        for _ in range(layers):
            for inputs, outputs in PHI:
                y = mb.slice_by_index(x=x, begin=[0] * 4, end=[1, min(inputs, 3072), 1, 1])
                y = y if inputs == 3072 else mb.tile(x=y, reps=[1, 3, 1, 1])
                y = mb.slice_by_index(x=y, begin=[0] * 4, end=[1, inputs, 1, 1])
                x = mb.conv(x=y, weight=weight(outputs, inputs, 1, 1, form="int8"))
        return x

    model = Model(body, inputs={"x": ((1, 3072, 1, 1), "fp16")}, states={"k": KV, "v": KV})
    count = 4 * layers
    found = placed(model.program(tmp_path))
    assert found.count(conv=True) == count
    assert found.count("ANE", conv=True) == (count if on_ane else 0)
    if not on_ane:  # no compute op at all
        assert found.count("ANE") == 0
        assert "program-constants" in {f.rule for f in found.findings}


QWEN = {"0.5B": (1930, 896, 24), "1.5B": (3424, 1536, 28), "3B": (4384, 2048, 36)}
"""Width of a square convolution of a quarter layer's weights, hidden size, layers."""


def qwen(size: str, form: str, layers: int = 0, stateful: bool = False) -> Model:
    """A Qwen2.5 by its weights: four equal convolutions a layer, attention's softmax, and a head
    if all layers are there."""
    width, hidden, count = QWEN[size]

    def layers_of(x: Any) -> Any:
        x = many_convs(mb.softmax(x=x, axis=1), 4 * (layers or count), form)
        if layers:
            return x
        x = mb.slice_by_index(x=x, begin=[0] * 4, end=[1, hidden, 1, 1])
        return conv(x, 151_936, form)

    def with_cache(x: Any, kv: Any) -> Any:
        keep(kv)
        return layers_of(x)

    states = {"states": {"kv": ((1, 8, 64, 256), "fp16")}} if stateful else {}
    return Model(with_cache if stateful else layers_of, **of((1, width, 1, 1)), **states)


@pytest.mark.parametrize(
    ("model", "count", "on_ane"),
    [
        (qwen("0.5B", "fp16", stateful=True), 97, True),
        (qwen("0.5B", "int8", stateful=True), 97, True),
        (qwen("0.5B", "int4-block32", stateful=True), 97, True),
        (qwen("0.5B", "int4-block32"), 97, False),
        (qwen("1.5B", "int4-block32", 3), 12, False),
        (qwen("3B", "int4-block32", 2), 8, False),
        (qwen("3B", "int8", 2), 8, True),
        (qwen("3B", "int4-block32", 1), 4, False),
    ],
    ids=["0.5B fp16", "0.5B int8", "0.5B int4, stateful", "0.5B int4, stateless",
         "1.5B, 3 layers, int4", "3B, 2 layers, int4", "3B, 2 layers, int8", "one layer, int4"],
)  # fmt: skip
def test_qwen(model: Model, count: int, on_ane: bool, tmp_path: Path) -> None:
    """Research on INT4: per block, all of it leaves the ANE, but for the large stateful graph."""
    found = placed(model.program(tmp_path))
    assert found.count(conv=True) == count
    assert found.count("ANE", conv=True) == (count if on_ane else 0)
    if not on_ane:
        assert found.count("CPU") == found.count()


@pytest.mark.parametrize(
    ("model", "fails"),
    [
        (qwen("1.5B", "int8", stateful=True), True),  # 1.5 GB: -14
        (qwen("1.5B", "int4-block32", stateful=True), False),  # 0.8 GB: it compiles and runs
        (qwen("3B", "int4-block32", stateful=True), True),  # 1.7 GB: -14
    ],
    ids=["1.5B int8", "1.5B int4", "3B int4"],
)
def test_whole_models(model: Model, fails: bool, tmp_path: Path) -> None:
    """Research on scale: error -14 from 1.5 GB on."""
    found = placed(model.program(tmp_path))
    assert (found.count("fails") == found.count()) is fails
    assert (found.count("fails") > 0) is fails


def test_gemma_stateful_is_refused(tmp_path: Path) -> None:
    """A cache that is shifted inside a state, with heads padded to 32 too: error -14."""

    def body(x: Any, kv: Any) -> Any:
        old = mb.read_state(input=kv)
        rest = mb.slice_by_index(x=old, begin=[0, 0, 1, 0], end=[1, 32, 512, 256])
        new = mb.concat(values=[rest, half((1, 32, 1, 256))], axis=2)
        mb.coreml_update_state(state=kv, value=new)
        return many_convs(x, 8, "lut4")

    states = {"kv": ((1, 32, 512, 256), "fp16")}
    model = Model(body, inputs={"x": ((1, 1536, 1, 1), "fp16")}, states=states)
    found = placed(model.program(tmp_path), "a19-pro")
    assert found.count("fails") == found.count()
    assert "state-shift" in {f.rule for f in found.findings}


def gemma_layer(x: Any, cache: Any, mask: Any) -> tuple[Any, Any]:
    """A layer of Gemma 4 E2B as CoreML-LLM writes it: norms by concat, softmax taken apart, a
    cache that is shifted outside any state."""

    def norm(x: Any) -> Any:
        both = mb.concat(values=[x, mb.mul(x=x, y=half((1,), -1))], axis=1)
        return mb.slice_by_index(
            x=mb.layer_norm(x=both, axes=[1], epsilon=half((), 1e-3)),
            begin=[0] * 4, end=[1, 1536, 1, 1],
        )  # fmt: skip

    q = mb.reshape(x=conv(norm(x), 2048, "lut4"), shape=[1, 8, 1, 256])
    k = mb.reshape(x=conv(norm(x), 256, "lut4"), shape=[1, 1, 1, 256])
    rest = mb.slice_by_index(x=cache, begin=[0, 0, 1, 0], end=[1, 1, 512, 256])
    cache = mb.concat(values=[rest, k], axis=2)
    scores = mb.add(x=mb.matmul(x=q, y=cache, transpose_y=True), y=mask)
    lowered = mb.sub(x=scores, y=mb.reduce_max(x=scores, axes=[3], keep_dims=True))
    powers = mb.exp(x=lowered)
    shares = mb.real_div(x=powers, y=mb.reduce_sum(x=powers, axes=[3], keep_dims=True))
    mixed = mb.reshape(x=mb.matmul(x=shares, y=cache), shape=[1, 2048, 1, 1])
    x = mb.add(x=x, y=conv(mixed, 1536, "lut4"))
    gated = mb.gelu(x=conv(norm(x), 6144, "lut4"), mode="TANH_APPROXIMATION")
    up = mb.mul(x=gated, y=conv(norm(x), 6144, "lut4"))
    return mb.add(x=x, y=conv(up, 1536, "lut4")), cache


GEMMA = {
    "x": ((1, 1536, 1, 1), "fp16"), "cache": ((1, 1, 512, 256), "fp16"),
    "mask": ((1, 1, 1, 512), "fp16"),
}  # fmt: skip


def test_gemma_chunks_1_to_3(tmp_path: Path) -> None:
    """No op on the CPU; an identity that is left over has no device."""

    def body(x: Any, cache: Any, mask: Any) -> Any:
        x, cache = gemma_layer(x, cache, mask)
        return mb.identity(x=x), cache

    found = placed(Model(body, inputs=GEMMA).program(tmp_path), "a19-pro")
    assert [op.kind for op in found.ops if op.placement != "ANE"] == ["identity"]
    assert found.count("unknown") == 1


def test_gemma_chunk_4(tmp_path: Path) -> None:
    """The softcap and the argmax behind it: eight ops on the CPU, and no other."""

    def body(x: Any, cache: Any, mask: Any) -> Any:
        x, _ = gemma_layer(x, cache, mask)
        logits = conv(x, 262_144, "lut4")
        capped = mb.mul(x=mb.tanh(x=mb.mul(x=logits, y=half((), 1 / 30))), y=half((), 30))
        row = mb.squeeze(x=mb.squeeze(x=capped, axes=[3]), axes=[2])
        token = mb.reduce_argmax(x=row, axis=1, keep_dims=False)
        index = mb.expand_dims(x=token, axes=[1])
        return token, mb.gather_along_axis(x=row, indices=index, axis=1)

    found = placed(Model(body, inputs=GEMMA).program(tmp_path), "a19-pro")
    off = [op.kind for op in found.ops if op.placement != "ANE"]
    assert {op.placement for op in found.ops} == {"ANE", "CPU"}
    assert sorted(off) == sorted(
        ["mul", "tanh", "mul", "squeeze", "squeeze", "reduce_argmax", "expand_dims",
         "gather_along_axis"]
    )  # fmt: skip
    assert found.table()["conv_non_ane"] == 0
    assert not {"fatal", "silent"} & {f.severity for f in found.findings}


def synthetic(hidden: int, inner: int, tokens: int) -> Model:
    """A transformer block by its four convolutions, at T tokens."""

    def body(x: Any) -> Any:
        x = conv(mb.softmax(x=conv(x, 2 * hidden, "int8"), axis=1), hidden, "int8")
        return conv(mb.silu(x=conv(x, inner, "int8")), hidden, "int8")

    return Model(body, inputs={"x": ((1, hidden, 1, tokens), "fp16")})


@pytest.mark.parametrize(
    ("hidden", "inner", "on_ane"),
    [(64, 128, False), (1024, 2048, True), (3072, 8192, True)],
)
def test_synthetic_blocks(hidden: int, inner: int, on_ane: bool, tmp_path: Path) -> None:
    """Journal 093: a block of 64 channels is too small for the ANE."""
    expected = (4, 4, 0) if on_ane else (4, 0, 4)
    assert convs(synthetic(hidden, inner, 4).program(tmp_path)) == expected


@pytest.mark.parametrize(
    ("outputs", "inputs", "on_ane"),
    [(163_840, 640, True), (66_688, 3072, True), (640, 81_920, False)],
)
def test_wide_and_deep_projections(outputs: int, inputs: int, on_ane: bool, tmp_path: Path) -> None:
    """Many outputs stay; 81920 products for one output do not."""
    model = Model(lambda x: conv(x, outputs, "int8"), **of((1, inputs, 1, 1)))
    assert convs(model.program(tmp_path)) == ((1, 1, 0) if on_ane else (1, 0, 1))


@pytest.mark.parametrize(
    ("model", "on_ane"),
    [
        (Model(lambda x: mb.linear(x=x, weight=weight(4096, 1024)), **of((1, 1, 1024))), False),
        (Model(lambda x: mb.linear(x=x, weight=weight(4104, 2048)), **of((1, 1, 2048))), True),
        (Model(lambda x: mb.linear(x=x, weight=weight(8192, 4096)), **of((1, 4096))), False),
    ],
    ids=["8.4 MB", "16.8 MB", "rank 2"],
)
def test_lone_linears(model: Model, on_ane: bool, tmp_path: Path) -> None:
    found = placed(model.program(tmp_path))
    assert {op.placement for op in found.ops} == {"ANE" if on_ane else "CPU"}


@pytest.mark.parametrize(("axis", "on_ane"), [(128, True), (50_016, False)])
def test_topk(axis: int, on_ane: bool, tmp_path: Path) -> None:
    """A router's stays; a vocabulary's goes, and its cast with it: 9 of 11 ops remain."""

    def body(x: Any) -> Any:
        values, _ = mb.topk(x=conv(many_convs(x, 2, "int8"), axis), k=4, axis=1)
        return mb.cast(x=values, dtype="fp16")

    found = placed(Model(body, **of((1, 2048, 1, 1))).program(tmp_path))
    wanted = "ANE" if on_ane else "CPU"
    assert [op.placement for op in found.ops if op.kind == "topk"] == [wanted]
    assert {op.placement for op in found.ops if op.kind == "conv"} == {"ANE"}
    if not on_ane:
        assert [op.placement for op in found.ops if op.kind == "cast"] == ["CPU"]
