import numpy as np
import pytest
from coremltools.optimize._utils import pack_elements_into_bits
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cetane.compress import Fp16, Linear, Palette, parse_format
from cetane.compress.encoded import Affine, Dense, Palettized
from cetane.errors import CetaneError

PALETTES = [
    f"palette{bits}-{mode}-{per}"
    for bits in (1, 2, 3, 4, 6, 8)
    for mode in ("uniform", "kmeans", "weighted")
    for per in ("group2", "per-tensor")
]
LINEAR = [f"int{bits}-per-{per}" for bits in (8, 4) for per in ("channel", "tensor", "block2")]
VECTORS = [
    f"palette{bits}-{mode}-vector{length}-{per}"
    for bits, length in ((1, 2), (2, 2), (3, 2), (4, 2), (1, 4), (2, 4))
    for mode in ("kmeans", "weighted")
    for per in ("group2", "per-tensor")
    if length == 2 or per == "per-tensor"
]
NAMES = ["fp16", *LINEAR, *PALETTES]

# Channels come in twos, so that every format above can encode every weight.
weights = hnp.arrays(
    np.float16,
    st.tuples(st.sampled_from([2, 4, 6]), st.sampled_from([2, 4, 6]), st.integers(1, 3)),
    elements=st.floats(-1000, 1000, width=16),
)


def encode(name: str, weight: np.ndarray) -> Dense | Affine | Palettized:
    """The encoding of a weight of which every second input counts three times as much."""
    sensitivity = np.where(np.arange(weight.shape[1]) % 2, 3, 1).astype(np.float32)
    return parse_format(name).encode(weight, sensitivity.reshape(1, -1, 1))


def packed_bytes(encoded: Dense | Affine | Palettized) -> int:
    if isinstance(encoded, Dense):
        return encoded.weight.nbytes
    if isinstance(encoded, Affine):
        packed = pack_elements_into_bits(encoded.data.flatten(), encoded.bits)
        return packed.nbytes + encoded.scale.nbytes
    packed = pack_elements_into_bits(encoded.indices.flatten(), encoded.bits)
    return packed.nbytes + encoded.lut.nbytes


@pytest.mark.parametrize("name", [*NAMES, *VECTORS])
def test_a_name_is_read_and_written(name: str) -> None:
    assert parse_format(name).name == name


def test_a_name_says_what_is_done() -> None:
    assert parse_format("fp16") == Fp16()
    assert parse_format("int8-per-tensor") == Linear(8, "tensor")
    assert parse_format("palette4-kmeans-group32") == Palette(4, "kmeans", 32)
    assert parse_format("palette6-uniform-per-tensor") == Palette(6, "uniform", None)
    assert [parse_format(name).bits for name in ("fp16", "int8-per-channel", PALETTES[0])] == [
        16,
        8,
        1,
    ]


@pytest.mark.parametrize(
    "name",
    [
        "",
        "int8",
        "FP16",
        "fp16 ",
        "int6-per-channel",
        "int4-per-block0",
        "int4-per-block",
        "palette5-kmeans-group32",
        "palette4-kmeans-group0",
        "palette4-kmeans-group032",
        "palette4-kmeans-group٣",
        "palette4-kmeans",
        "palette4-median-group8",
        "palette4-kmeans-vector4-per-tensor",
        "palette6-kmeans-vector2-per-tensor",
        "palette4-kmeans-vector3-per-tensor",
        "palette4-uniform-vector2-per-tensor",
        "palette4-kmeans-vector2-group3",
    ],
)
def test_an_unknown_name_is_answered_with_the_grammar(name: str) -> None:
    with pytest.raises(CetaneError, match="unknown compression format") as error:
        parse_format(name)
    assert "palette4-kmeans-group32" in (error.value.hint or "")


@given(name=st.sampled_from(NAMES), weight=weights)
def test_nbytes_are_those_of_the_packed_constants(name: str, weight: np.ndarray) -> None:
    assert parse_format(name).nbytes(weight.shape) == packed_bytes(encode(name, weight))


@given(name=st.sampled_from(NAMES), weight=weights)
def test_decoding_gives_fp16_of_the_same_shape(name: str, weight: np.ndarray) -> None:
    decoded = encode(name, weight).decode()
    assert decoded.dtype == np.float16
    assert decoded.shape == weight.shape


@given(weight=weights)
def test_fp16_keeps_every_value(weight: np.ndarray) -> None:
    np.testing.assert_array_equal(Fp16().encode(weight).decode(), weight)


@pytest.mark.parametrize("name", LINEAR)
@given(weight=weights)
def test_linear_is_within_half_a_step(name: str, weight: np.ndarray) -> None:
    encoded = parse_format(name).encode(weight)
    assert isinstance(encoded, Affine)
    blocks = weight.shape[1] // encoded.scale.shape[1] if "block" in name else 1
    scale = encoded.scale.astype(np.float64).repeat(blocks, axis=1)
    error = np.abs(encoded.decode().astype(np.float64) - weight)
    # On top of half a step: the quotient rounds to fp16 (1/32 near 127), and so does the product
    # (1/16 of a step). The scale itself can be off by half of fp16's smallest number, 2**-25,
    # which the clip at 127 multiplies.
    assert (error <= scale * (0.5 + 1 / 32 + 1 / 16) + 128 * 2.0**-25).all()


@given(name=st.sampled_from([name for name in PALETTES if "uniform" in name]), weight=weights)
def test_a_uniform_palette_is_within_half_a_step(name: str, weight: np.ndarray) -> None:
    fmt = parse_format(name)
    encoded = fmt.encode(weight)
    groups = weight.astype(np.float64).reshape(encoded.lut.shape[0], -1)
    span = np.ptp(groups, axis=1, keepdims=True)
    decoded = encoded.decode().astype(np.float64).reshape(groups.shape)
    # Half a step and fp16's rounding of the step and of the entries.
    largest = np.abs(groups).max(axis=1, keepdims=True)
    bound = span * (0.5 / (2**fmt.bits - 1) + 2.0**-9) + largest * 2.0**-9 + 2.0**-16
    assert (np.abs(decoded - groups) <= bound).all()


def test_a_block_has_its_own_scale() -> None:
    weight = np.array([[7, -3, 0.5, 0.25], [14, 2, -7, 7]], dtype=np.float16)
    encoded = Linear(4, 2).encode(weight)
    np.testing.assert_array_equal(encoded.scale, np.float16([[1, 0.5 / 7], [2, 1]]))
    np.testing.assert_array_equal(encoded.data, [[7, -3, 7, 4], [7, 1, -7, 7]])
    assert encoded.packed().tolist() == [0xD7, 0x47, 0x17, 0x79]  # the first in the lower half


def test_a_value_is_the_scale_times_the_int8() -> None:
    weight = np.array([[127 / 64, -0.5], [0, 0], [1e-7, 0]], dtype=np.float16)
    encoded = Linear(8, "channel").encode(weight)
    np.testing.assert_array_equal(encoded.data, [[127, -32], [0, 0], [0, 0]])
    np.testing.assert_array_equal(encoded.scale, [[1 / 64], [0], [0]])  # 1e-7 / 127 is 0 in fp16


@given(largest=st.integers(1, 0x7BFF))
def test_int8_is_numpys_arithmetic_for_every_value(largest: int) -> None:
    patterns = np.arange(largest + 1, dtype=np.uint16)
    weight = np.concatenate([patterns, patterns | 0x8000]).view(np.float16)
    scale = min(weight[largest] / np.float16(127), np.float16(515.5))  # 516 · 127 is infinite
    expected = np.zeros(weight.shape, dtype=np.int8)
    if scale > 0:
        expected[:] = np.clip(np.round(weight / scale), -127, 127)
    encoded = Linear(8, "channel").encode(weight[None])
    np.testing.assert_array_equal(encoded.data[0], expected)
    assert encoded.scale[0, 0] == scale


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@given(shape=hnp.array_shapes(max_dims=3, max_side=9), seed=st.integers(0, 99))
def test_packed_indices_are_coremltools(shape: tuple[int, ...], seed: int, bits: int) -> None:
    indices = np.random.default_rng(seed).integers(0, 2**bits, shape, dtype=np.uint8)
    packed = Palettized(indices, np.zeros((1, 2**bits, 1), dtype=np.float16), bits).packed()
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, pack_elements_into_bits(indices.flatten(), bits))


def test_a_palette_entry_is_found_by_group() -> None:
    lut = np.array([1, 5, 9, 13, 2, 10, 18, 26], dtype=np.float16).reshape(2, 1, 4, 1)
    indices = np.array([[2, 3], [3, 0], [1, 0], [3, 0], [2, 1], [0, 3]], dtype=np.uint8)
    # The example in the documentation of coremltools' constexpr_lut_to_dense.
    expected = [[9, 13], [13, 1], [5, 1], [26, 2], [18, 10], [2, 26]]
    np.testing.assert_array_equal(Palettized(indices, lut, 2).decode(), expected)


@pytest.mark.parametrize("name", ["int8-per-channel", "palette4-uniform-group2"])
def test_fp32_is_rounded_to_fp16_first(name: str) -> None:
    weight = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)
    fmt = parse_format(name)
    np.testing.assert_array_equal(
        fmt.encode(weight).decode(), fmt.encode(weight.astype(np.float16)).decode()
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [1e5, -np.inf, np.nan])
def test_a_value_beyond_fp16_is_refused(name: str, value: float) -> None:
    weight = np.ones((2, 3), dtype=np.float32)
    weight[1, 1] = value
    weight = weight[:, :2]
    with pytest.raises(CetaneError, match=f"a weight of {abs(value):g} is not finite"):
        encode(name, weight)


@pytest.mark.parametrize("name", ["int8-per-channel", "int4-per-channel", "int8-per-tensor",
                                  "int4-per-block4"])  # fmt: skip
def test_no_integer_is_beyond_fp16(name: str) -> None:
    """65504 / 7 rounds up to 9360 in fp16, and 7 · 9360 is infinite there."""
    weight = np.array([[65504, -65504, 30000, 0], [1, 2, 3, 4]], dtype=np.float16)
    form = parse_format(name)
    decoded = form.encode(weight).decode().astype(np.float64)
    assert np.isfinite(decoded).all()
    step = 65504 / (2 ** (form.bits - 1) - 1)
    assert np.abs(decoded - weight.astype(np.float64)).max() < 0.51 * step


def test_a_span_beyond_fp16_has_no_uniform_palette() -> None:
    weight = np.array([[-60000, 60000]], dtype=np.float16)
    with pytest.raises(CetaneError, match="from -60000 to 60000"):
        Palette(1, "uniform", 1).encode(weight)
    np.testing.assert_array_equal(Palette(1, "kmeans", 1).encode(weight).decode(), weight)


def test_channels_that_do_not_divide_into_groups_are_refused() -> None:
    fmt = parse_format("palette4-kmeans-group32")
    with pytest.raises(CetaneError, match=r"lm_head.weight has shape \(48, 8\).*groups of 32"):
        fmt.check((48, 8), "lm_head.weight")
    with pytest.raises(CetaneError, match="groups of 32"):
        fmt.encode(np.zeros((48, 8), dtype=np.float16))
    fmt.check((64, 8), "lm_head.weight")
    parse_format("int8-per-channel").check((48, 8), "lm_head.weight")


def test_inputs_that_do_not_divide_into_blocks_are_refused() -> None:
    fmt = parse_format("int4-per-block32")
    with pytest.raises(CetaneError, match=r"down.weight has shape \(8, 48\).*blocks of 32"):
        fmt.check((8, 48), "down.weight")
    with pytest.raises(CetaneError, match="blocks of 32"):
        fmt.encode(np.zeros((8, 48), dtype=np.float16))
    with pytest.raises(CetaneError, match="blocks of 32"):
        fmt.check((32,), "a vector")
    fmt.check((48, 64, 1, 1), "down.weight")


@pytest.mark.parametrize(
    ("sensitivity", "message"),
    [
        (None, "needs sensitivities"),
        (np.ones((1, 3), np.float32), "do not fit"),
        (-np.ones((1, 4), np.float32), "negative"),
        (np.full((1, 4), np.nan, np.float32), "not finite"),
        (np.full((1, 4), np.inf, np.float32), "not finite"),
    ],
)
def test_a_bad_sensitivity_is_refused(sensitivity: np.ndarray | None, message: str) -> None:
    with pytest.raises(CetaneError, match=message):
        Palette(2, "weighted", 2).encode(np.zeros((4, 4), np.float16), sensitivity)


def test_where_all_errors_count_the_same_weighted_is_kmeans() -> None:
    weight = np.random.default_rng(3).normal(size=(8, 64)).astype(np.float16)
    plain = Palette(3, "kmeans", 4).encode(weight)
    for value in (0, 1, 7e-30):
        same = Palette(3, "weighted", 4).encode(weight, np.full((1, 1), value, np.float32))
        np.testing.assert_array_equal(same.decode(), plain.decode())
