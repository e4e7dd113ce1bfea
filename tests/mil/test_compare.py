"""Programs in which one thing is wrong: exactly that op must be named, wherever it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
from coremltools.converters.mil import Builder as mb
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cetane.errors import CetaneError
from cetane.mil import load
from cetane.mil.compare import Comparer
from cetane.mil.comparison import Comparison, worst
from cetane.mil.executor import Executable
from cetane.mil.inputs import random_inputs
from cetane.mil.validate import check_function

Build = Callable[..., Path]

WIDTH, LAYERS = 8, 3
RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.standard_normal((LAYERS, 2, WIDTH, WIDTH)).astype(np.float32)
PLANTS = ("epsilon", "weight", "gelu", "rewired", None)
TOLERANCE = 1e-5
SLOW = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Network:
    """A small gated network; `plant` says what is wrong in `layer`."""

    plant: str | None = None
    layer: int = 0
    names: str = ""
    fused: bool = True
    half_weights: bool = False

    def wrong(self, plant: str, layer: int) -> bool:
        return (self.plant, self.layer) == (plant, layer)

    def __call__(self, x: Any) -> Any:
        for n in range(LAYERS):
            name = f"{self.names}layer_{n}_".__add__
            epsilon = 0.1 if self.wrong("epsilon", n) else 1e-5
            normed = self.norm(x, epsilon, name("norm"))
            up, gate = WEIGHTS[n]
            if self.wrong("weight", n):
                up = up.copy()
                up[3, 5] += 1
            up = mb.linear(
                x=normed, weight=mb.const(val=up, name=name("up_weight")), name=name("up")
            )
            gate = mb.linear(
                x=normed, weight=mb.const(val=gate, name=name("gate_weight")), name=name("gate")
            )
            mode = "TANH_APPROXIMATION" if self.wrong("gelu", n) else "EXACT"
            active = mb.gelu(x=gate, mode=mode, name=name("active"))
            other = normed if self.wrong("rewired", n) else up
            x = mb.add(x=x, y=mb.mul(x=active, y=other, name=name("mixed")), name=name("out"))
        return x

    def norm(self, x: Any, epsilon: float, name: str) -> Any:
        if self.fused:
            return mb.layer_norm(x=x, axes=[-1], epsilon=np.float32(epsilon), name=name)
        mean = mb.reduce_mean(x=x, axes=[-1], keep_dims=True, name=f"{name}_mean")
        centred = mb.sub(x=x, y=mean, name=f"{name}_centred")
        square = mb.square(x=centred, name=f"{name}_square")
        variance = mb.reduce_mean(x=square, axes=[-1], keep_dims=True, name=f"{name}_variance")
        scale = mb.rsqrt(x=variance, epsilon=np.float32(epsilon), name=f"{name}_scale")
        return mb.mul(x=centred, y=scale, name=f"{name}_result")


PLANTED = {"epsilon": "norm", "weight": "up", "gelu": "active", "rewired": "mixed"}
CAUSES = {"epsilon": "parameter: epsilon", "weight": "weights: weight",
          "gelu": "parameter: mode", "rewired": "graph:"}  # fmt: skip


@pytest.fixture(scope="module")
def network(build: Build) -> Callable[..., Path]:
    """`network(...)`: the package of a `Network`, built once."""
    made: dict[Network, Path] = {}

    def package(**options: Any) -> Path:
        wanted = Network(**options)
        if wanted not in made:
            made[wanted] = build({"x": ((2, WIDTH), "fp32")}, wanted)
        return made[wanted]

    return package


def compared(first: Path, second: Path, precision: Any = "fp32", **inputs: Any) -> Comparison:
    one, other = (load(path).functions["main"] for path in (first, second))
    comparer = Comparer(Executable(one, "fp32"), Executable(other, precision))
    return comparer(inputs or random_inputs(one))


@given(
    plant=st.sampled_from(PLANTS),
    layer=st.integers(0, LAYERS - 1),
    names=st.sampled_from(["", "renamed_", "var_1"]),
)
@SLOW
def test_the_op_that_is_wrong_is_named(
    network: Callable[..., Path], plant: str | None, layer: int, names: str
) -> None:
    result = compared(network(), network(plant=plant, layer=layer, names=names))
    assert len(result.ops) == 6 * LAYERS
    assert result.only_first == result.only_second == ()
    wrong = [op for op in result.ops if op.own.relative > TOLERANCE]
    if plant is None:
        assert not wrong
        assert not result.parted(TOLERANCE)
        return
    (op,) = wrong
    assert op == result.first_own(TOLERANCE)
    assert op.name == f"{names}layer_{layer}_{PLANTED[plant]}"
    assert op.counterpart == f"layer_{layer}_{PLANTED[plant]}"
    assert [cause.startswith(CAUSES[plant]) for cause in op.causes] == [True]
    assert result.parted(TOLERANCE)
    # What comes after is off too, and not to blame; what comes before is not.
    place = result.ops.index(op)
    assert all(before.total.relative < TOLERANCE for before in result.ops[:place])
    (output,) = result.outputs.values()
    assert output == result.ops[-1].total


@given(plant=st.sampled_from(["weight", "gelu", None]), layer=st.integers(0, LAYERS - 1))
@SLOW
def test_a_norm_may_be_one_op_or_six(
    network: Callable[..., Path], plant: str | None, layer: int
) -> None:
    result = compared(network(), network(plant=plant, layer=layer, fused=False, names="other_"))
    assert len(result.ops) == 5 * LAYERS
    assert len(result.only_first) == LAYERS
    assert len(result.only_second) == 6 * LAYERS
    assert all(op.name.removeprefix("other_") == op.counterpart for op in result.ops)
    own = [op.name for op in result.ops if op.own.relative > TOLERANCE]
    assert own == ([] if plant is None else [f"other_layer_{layer}_{PLANTED[plant]}"])


def test_an_error_of_ops_that_only_one_has_shows_in_the_next(network: Callable[..., Path]) -> None:
    result = compared(network(), network(plant="epsilon", layer=1, fused=False))
    own = [op for op in result.ops if op.own.relative > TOLERANCE]
    assert [op.name for op in own] == ["layer_1_up", "layer_1_gate"]
    assert all("graph: its inputs are made in another way" in op.causes for op in own)


def test_the_figures_are_numpys(network: Callable[..., Path]) -> None:
    x = RANDOM.standard_normal((2, WIDTH)).astype(np.float32)
    result = compared(network(), network(plant="weight", layer=0), x=x)
    op = result.first_own(TOLERANCE)
    assert op is not None
    centred = x - x.mean(1, keepdims=True)
    normed = centred / np.sqrt(np.square(centred).mean(1, keepdims=True) + 1e-5)
    right = normed @ WEIGHTS[0, 0].T
    difference = np.zeros_like(right)
    difference[:, 3] = normed[:, 5]  # the planted weight
    wrong = right + difference
    row = np.abs(difference[:, 3]).argmax()
    assert op.own.relative == pytest.approx(
        np.linalg.norm(difference) / np.linalg.norm(right), rel=1e-4
    )
    assert op.own.largest == pytest.approx(np.abs(difference).max(), rel=1e-4)
    assert op.own.worst == (row, 3)
    assert op.own.values == pytest.approx((right[row, 3], wrong[row, 3]), rel=1e-4)
    assert op.own.cosine == pytest.approx(
        (right * wrong).sum() / np.linalg.norm(right) / np.linalg.norm(wrong), rel=1e-5
    )
    assert op.largest == pytest.approx(np.abs(right).max(), rel=1e-5)
    (operand,) = op.inputs
    assert (operand.name, operand.shape) == ("layer_0_norm", (2, WIDTH))
    assert (operand.low, operand.high) == pytest.approx((normed.min(), normed.max()), rel=1e-4)
    (constant,) = op.constants
    assert constant.relative == pytest.approx(1 / np.linalg.norm(WEIGHTS[0, 0]), rel=1e-5)
    assert op.scope == "layer_0_up"
    scopes = {op.name: op.scope for op in result.ops}
    assert scopes["layer_1_norm"] == "after layer_0_gate"
    # Alone: every op computes what it does from the first program's values.
    totals = [found.total.relative for found in result.ops[result.ops.index(op) :]]
    assert sum(total > TOLERANCE for total in totals) > 10


def test_a_palettized_weight_is_compared_as_values(build: Build) -> None:
    indices = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.uint8)
    lut = np.array([-1, 0, 0.5, 2], np.float32)
    exact = lut[indices]
    coded = mb_uint2(indices)

    def palette(values: np.ndarray) -> Callable[..., Any]:
        def body(x: Any) -> Any:
            w = mb.constexpr_lut_to_dense(
                indices=coded, lut=values.reshape(1, 1, 4, 1), name="fc_weight_palettized"
            )
            return mb.linear(x=x, weight=w, name="y")

        return body

    dense = build(
        {"x": ((1, 4), "fp32")},
        lambda x: mb.linear(x=x, weight=mb.const(val=exact, name="fc_weight"), name="y"),
    )
    same = compared(dense, build({"x": ((1, 4), "fp32")}, palette(lut)))
    assert [op.constants for op in same.ops] == [()]
    assert not same.parted(1e-9)
    off = lut.copy()
    off[3] = 3
    (op,) = compared(dense, build({"x": ((1, 4), "fp32")}, palette(off))).ops
    (constant,) = op.constants
    wrong = off[indices]
    assert constant.relative == pytest.approx(np.linalg.norm(wrong - exact) / np.linalg.norm(exact))
    assert (constant.parameter, constant.weight) == ("weight", True)
    assert op.scope == "fc"


def mb_uint2(indices: np.ndarray) -> Any:
    from coremltools.converters.mil.mil import types

    return indices.astype(types.nptype_from_builtin(types.string_to_builtin("uint2")))


def swapped(names: tuple[str, str]) -> Callable[..., Any]:
    """Two projections of one tensor, written in either order."""

    def body(x: Any) -> Any:
        made = {
            n: mb.linear(
                x=x,
                weight=mb.const(val=WEIGHTS[0, "qk".index(n)], name=f"{n}_proj_weight"),
                name=f"var_{place}",
            )
            for place, n in enumerate(names)
        }
        return mb.sub(x=made["q"], y=made["k"], name="y")

    return body


def test_siblings_are_told_apart_by_their_weights(build: Build) -> None:
    """The converter's numbers say the opposite: var_0 is q in one program, k in the other."""
    inputs = {"x": ((1, WIDTH), "fp32")}
    result = compared(build(inputs, swapped(("q", "k"))), build(inputs, swapped(("k", "q"))))
    assert {op.name: op.counterpart for op in result.ops} == {
        "var_0": "var_1",
        "var_1": "var_0",
        "y": "y",
    }
    assert not result.parted(1e-6)


@pytest.mark.parametrize("scaled", range(4))
def test_where_fp16_overflows(build: Build, scaled: int) -> None:
    def chain(x: Any) -> Any:
        for n in range(4):
            x = mb.mul(x=x, y=np.float16(300 if n == scaled else 1), name=f"scale_{n}")
        return mb.mul(x=x, y=np.float16(0.001), name="y")

    path = build({"x": ((4,), "fp16")}, chain)
    x = np.array([1, -300, 2, 0], np.float16)
    result = compared(path, path, "fp16", x=x)
    op = result.first_own(1e-3)
    assert op is not None
    assert op.name == f"scale_{scaled}"
    assert op.causes == ("fp16: overflow",)
    assert op.own.overflowed == 1
    assert op.own.relative == np.inf
    assert op.own.worst == (1,)
    assert op.own.values == (-90000, -np.inf)
    assert op.largest == 90000
    # -90000 is not a value of fp16, so every op after it that is given it overflows by itself too.
    own = [found.name for found in result.ops if found.own.relative > 1e-3]
    assert own == [f"scale_{n}" for n in range(scaled, 4)]
    assert result.first_total(1e-3) == op
    assert not compared(path, path, "fp16", x=x / 10).parted(1e-3)


def test_where_fp16_underflows(build: Build) -> None:
    path = build(
        {"x": ((4,), "fp16")},
        lambda x: mb.mul(x=mb.mul(x=x, y=np.float16(1e-4), name="small"), y=x, name="y"),
    )
    x = np.array([1e-1, 1e-2, 1e-5, 1], np.float16)
    result = compared(path, path, "fp16", x=x)
    small = result.ops[0]
    with np.errstate(under="ignore"):
        rounded = (x.astype(np.float32) * np.float32(np.float16(1e-4))).astype(np.float16)
    assert small.own.vanished == (rounded == 0).mean() == 0.25
    assert small.causes == ("fp16: 0.25 of it becomes zero",)
    assert small.half


def test_an_fp32_program_against_its_fp16_conversion(tmp_path: Path) -> None:
    """coremltools' own cast pass: casts at the ends, every name with a suffix."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8), torch.nn.Softmax(-1)
    ).eval()
    traced = torch.jit.trace(model, torch.zeros(2, 8))
    paths = []
    for precision in (ct.precision.FLOAT32, ct.precision.FLOAT16):
        paths.append(tmp_path / f"{precision.name}.mlpackage")
        ct.convert(
            traced,
            inputs=[ct.TensorType("x", shape=(2, 8), dtype=np.float32)],
            outputs=[ct.TensorType("y", dtype=np.float32)],
            compute_precision=precision,
            minimum_deployment_target=ct.target.iOS18,
            skip_model_load=True,
        ).save(str(paths[-1]))
    result = compared(*paths)
    assert result.only_first == result.only_second == ()
    kinds = [op.kind for op in result.ops]
    assert [kind for kind in kinds if kind != "cast"] == ["linear", "gelu", "linear", "softmax"]
    assert not result.parted(1e-3)
    linear = result.ops[kinds.index("linear")]
    assert {constant.parameter for constant in linear.constants} == {"weight", "bias"}
    assert all(0 < constant.relative < 2**-11 for constant in linear.constants)
    rounding = compared(*paths, "fp16")
    assert {"fp16: rounding"} < {cause for op in rounding.ops for cause in op.causes}
    assert not rounding.parted(1e-3)


def test_integers_and_booleans(build: Build) -> None:
    def body(limit: float) -> Callable[..., Any]:
        def decide(x: Any) -> Any:
            high = mb.greater(x=x, y=np.float32(limit), name="high")
            return mb.cast(x=high, dtype="int32", name="y")

        return decide

    inputs = {"x": ((4,), "fp32")}
    x = np.array([0, 1, 2, 3], np.float32)
    result = compared(build(inputs, body(0.5)), build(inputs, body(1.5)), x=x)
    high, y = result.ops
    assert (high.own.relative, high.own.worst, high.own.values) == (0.25, (1,), (1, 0))
    assert high.causes == ("parameter: y 1.5, was 0.5",)
    assert (y.own.relative, y.total.relative) == (0, 0.25)
    assert result.outputs["y"].relative == 0.25


def test_nans_in_the_same_places_are_equal(network: Callable[..., Path]) -> None:
    x = np.ones((2, WIDTH), np.float32)
    x[0, 0] = np.nan
    assert not compared(network(), network(), x=x).parted(1e-9)
    wrong = compared(network(), network(plant="weight", layer=2), x=x + np.eye(2, WIDTH, 3))
    op = wrong.first_own(TOLERANCE)
    assert op is not None
    assert op.name == "layer_2_up"


def loop(step: float, times: int = 3, flip: bool = False) -> Callable[..., Any]:
    def body(x: Any) -> Any:
        def condition(i: Any, _: Any) -> Any:
            return mb.less(x=i, y=np.float32(times), name="goes_on")

        def once(i: Any, x: Any) -> Any:
            return mb.add(x=i, y=np.float32(1), name="next"), mb.mul(
                x=x, y=np.float32(step), name="grown"
            )

        _, x = mb.while_loop(_cond=condition, _body=once, loop_vars=(np.float32(0), x), name="loop")
        total = mb.reduce_sum(x=x, axes=[0], keep_dims=False, name="total")
        limit = np.float32(1e9 if flip else -1e9)
        return mb.cond(
            pred=mb.greater(x=total, y=limit, name="which"),
            _true_fn=lambda: mb.mul(x=x, y=np.float32(2), name="doubled"),
            _false_fn=lambda: mb.sub(x=x, y=np.float32(1), name="less"),
            name="y",
        )

    return body


def test_loops_and_branches(build: Build) -> None:
    inputs = {"x": ((2,), "fp32")}
    x = np.array([1, 2], np.float32)
    right = build(inputs, loop(2))
    assert not compared(right, build(inputs, loop(2)), x=x).parted(1e-9)
    grown = compared(right, build(inputs, loop(3)), x=x).first_own(TOLERANCE)
    assert grown is not None
    assert grown.name == "grown"
    assert grown.own.relative == pytest.approx(0.5)
    assert grown.total.relative == pytest.approx((3**3 - 2**3) / 2**3)  # the last round is worst
    flipped = compared(right, build(inputs, loop(2, flip=True)), x=x).first_own(TOLERANCE)
    assert flipped is not None
    assert flipped.name == "which"
    fewer = compared(right, build(inputs, loop(2, times=2)), x=x)
    assert fewer.first_own(TOLERANCE) is not None
    assert fewer.first_own(TOLERANCE).name == "goes_on"  # type: ignore[union-attr]


def counter(step: float) -> Callable[..., Any]:
    def body(x: Any, s: Any) -> Any:
        before = mb.read_state(input=s, name="before")
        after = mb.add(x=before, y=mb.mul(x=x, y=np.float16(step), name="step"), name="after")
        mb.coreml_update_state(state=s, value=after)
        return mb.mul(x=after, y=np.float16(2), name="y")

    return body


def test_states_start_alike_and_stay_as_they_are(build: Build) -> None:
    built = [
        build({"x": ((2,), "fp16")}, counter(step), states={"s": ((2,), "fp16")})
        for step in (1, 1.5)
    ]
    first, second = (Executable(load(path).functions["main"]) for path in built)
    state = first.make_state()
    state.tensors["s"] += 5
    comparer = Comparer(first, second)
    x = np.array([1, 2], np.float16)
    for _ in range(2):  # nothing is written into the state that was given
        result = comparer({"x": x}, state)
        op = result.first_own(TOLERANCE)
        assert op is not None
        assert op.name == "step"
        values = {found.name: found for found in result.ops}
        assert values["after"].own.relative == 0
        assert values["after"].largest == 7
        assert state.tensors["s"].tolist() == [5, 5]


def test_ops_after_the_last_compared_one(build: Build) -> None:
    """A small error that only the second program's last op makes adds up with no other."""

    def body(x: Any, scale: float | None = None) -> Any:
        if scale is None:
            return mb.exp(x=x, name="y")
        return mb.mul(x=mb.exp(x=x, name="inner"), y=np.float32(scale), name="y")

    inputs = {"x": ((3,), "fp32")}
    first = build(inputs, body)
    for scale, wrong in ((1.01, True), (1.0, False)):
        result = compared(first, build(inputs, lambda x, s=scale: body(x, s)))
        assert result.only_second == ("y (mul)",)
        assert result.own_outputs["y"].relative == pytest.approx(scale - 1, abs=1e-6)
        assert result.parted(1e-3) is wrong


@pytest.mark.parametrize("kind", ["forgets", "writes another"])
def test_states_after_the_call(build: Build, kind: str) -> None:
    """The outputs are right."""

    def body(x: Any, s: Any, wrong: bool = False) -> Any:
        after = mb.add(x=mb.read_state(input=s), y=x, name="after")
        other = mb.mul(x=after, y=np.float16(1.01), name="other")
        if not wrong or kind == "writes another":
            mb.coreml_update_state(state=s, value=other if wrong else after)
        return after, other

    given = {"x": ((2,), "fp16")}, {"s": ((2,), "fp16")}
    right, wrong = (
        build(given[0], lambda x, s, w=w: body(x, s, w), states=given[1]) for w in (False, True)
    )
    assert not compared(right, right).parted(1e-3)
    result = compared(right, wrong)
    assert result.own_outputs["s"].relative > 1e-3
    assert result.parted(1e-3)


def test_random_numbers_are_drawn_alike(build: Build) -> None:
    def body(x: Any) -> Any:
        return mb.add(
            x=x, y=mb.random_normal(shape=np.array([4], np.int32), name="noise"), name="y"
        )

    path = build({"x": ((4,), "fp32")}, body)
    assert not compared(path, path).parted(1e-9)


def test_the_worst_of_several_inputs(network: Callable[..., Path]) -> None:
    one, other = network(), network(plant="weight", layer=1)
    inputs = [RANDOM.standard_normal((2, WIDTH)).astype(np.float32) for _ in range(3)]
    results = [compared(one, other, x=x) for x in inputs]
    merged = worst(results)
    assert [op.name for op in merged.ops] == [op.name for op in results[0].ops]
    for place, op in enumerate(merged.ops):
        assert op.own.relative == max(r.ops[place].own.relative for r in results)
        assert op.total.relative == max(r.ops[place].total.relative for r in results)
        assert op.largest == max(r.ops[place].largest for r in results)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"x": ((2, 9), "fp32")}, "input x is fp32 (2, 8) in the first program, fp32 (2, 9) in"),
        ({"x": ((2, 8), "int32")}, "input x is fp32 (2, 8) in the first program, int32 (2, 8) in"),
        ({"z": ((2, 8), "fp32")}, "only the first program has the input x"),
    ],
)
def test_other_interfaces(
    build: Build, network: Callable[..., Path], inputs: Any, message: str
) -> None:
    other = build(inputs, lambda **given: mb.identity(x=next(iter(given.values())), name="y"))
    with pytest.raises(CetaneError, match=message.replace("(", r"\(").replace(")", r"\)")):
        compared(network(), other)


def test_programs_with_nothing_in_common(build: Build, network: Callable[..., Path]) -> None:
    other = build({"x": ((2, WIDTH), "fp32")}, lambda x: mb.sin(x=x, name="wave"))
    result = compared(network(), other)
    assert result.ops == ()
    assert result.outputs == {}
    assert result.only_second == ("wave (sin)",)
    assert len(result.only_first) == 6 * LAYERS
    assert result.missing == ("layer_2_out",)
    assert result.parted(1e9)


def test_the_order_of_a_sums_terms_means_nothing(build: Build) -> None:
    def body(turned: bool) -> Callable[..., Any]:
        def total(x: Any) -> Any:
            terms = [mb.sin(x=x, name="s"), mb.cos(x=x, name="c")]
            a, b = reversed(terms) if turned else terms
            return mb.add(x=a, y=b, name="y")

        return total

    inputs = {"x": ((2,), "fp32")}
    result = compared(build(inputs, body(False)), build(inputs, body(True)))
    assert [op.counterpart for op in result.ops] == ["s", "c", "y"]
    assert not any(op.rewired for op in result.ops)


def test_ops_that_read_themselves_are_refused(build: Build) -> None:
    """No converter makes such a program, a hostile package may hold one. Data flow is followed only
    in programs that passed this check, so it comes to an end."""
    path = build({"x": ((2,), "fp32")}, lambda x: mb.identity(x=mb.sin(x=x, name="s"), name="y"))
    function = load(path).functions["main"]
    sin, identity = (op for op in function.ops if op.kind != "const")
    circle = replace(identity, inputs={"x": ("y",)})
    pair = (
        replace(sin, kind="identity", inputs={"x": ("y",)}),
        replace(identity, inputs={"x": ("s",)}),
    )
    for ops in ((sin, circle), pair):
        with pytest.raises(CetaneError, match="'y'"):
            check_function(replace(function, body=replace(function.body, ops=ops)))
