"""Parts of a mix: their words, and the palettes that they get."""

from dataclasses import replace
from itertools import product

import pytest

from cetane.compress import Palette, parse_format
from cetane.errors import CetaneError
from cetane.families import Weight
from cetane.pipeline.mixed_parts import ERRORS, MixedPart, best_mix, described, error, widths


def part(kind: str, *layers: int | None) -> MixedPart:
    places = ["" if layer is None else f"model.layers.{layer}." for layer in layers]
    weights = [Weight(f"{place}{kind}.weight", (8, 8), (8, 8), "mlp") for place in places]
    return MixedPart(tuple(weights), ())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([part("up_proj", 3, 4)], "up_proj of layers 3 to 4"),
        ([part("up_proj", 2, 3), part("up_proj", 0, 1)], "up_proj of layers 0 to 3"),
        ([part("v_proj", 0, 1), part("v_proj", 4, 5)], "v_proj of layers 0 to 1 and 4 to 5"),
        ([part("k_proj", 7)], "k_proj of layer 7"),
        ([part("k_proj", 0, 1), part("v_proj", 0, 1)], "k_proj and v_proj of layers 0 to 1"),
        (
            [part("k_proj", 0, 1), part("v_proj", 0), part("lm_head", None)],
            "k_proj of layers 0 to 1, v_proj of layer 0, lm_head",
        ),
    ],
)
def test_words(parts: list[MixedPart], words: str) -> None:
    assert described(parts) == words


UNIFORM = Palette(4, "kmeans", 8)


def wide(kind: str, harm: float) -> tuple[MixedPart, dict[str, float]]:
    """A part of one weight of 64 x 1024, and what it costs in four bits."""
    weight = Weight(f"model.layers.0.{kind}.weight", (64, 1024), (64, 1024), "mlp")
    return MixedPart((weight,), (weight.name,)), {weight.name: harm}


def test_a_mix_is_the_best_of_all_that_fit() -> None:
    """By trying them all."""
    costs = {"q_proj": 0.001, "v_proj": 0.02, "up_proj": 0.004, "down_proj": 0.005}
    made = [wide(kind, harm) for kind, harm in costs.items()]
    parts, harms = [part for part, _ in made], {k: v for _, own in made for k, v in own.items()}
    mix = best_mix(parts, harms, UNIFORM, 4.7)
    assert mix is not None and mix.bits <= 4.7

    def size(bits: tuple[int, ...]) -> float:
        tables = {b: 2**b * 16 / (8 if b < 6 else 32) / 1024 for b in ERRORS}
        return sum(b + tables[b] for b in bits) / len(bits)

    found = [sum(harm * ERRORS[b] / ERRORS[4] for harm, b in zip(costs.values(), bits, strict=True))
             for bits in product((4, 6), repeat=4) if size(bits) <= 4.7]  # fmt: skip
    assert mix.harm * sum(costs.values()) == pytest.approx(min(found))
    names = mix.names(UNIFORM.name)
    assert names["model.layers.0.v_proj.weight"] == "palette6-kmeans-group32"
    assert UNIFORM.name not in names.values()
    assert mix.described(UNIFORM.name).startswith(f"{mix.bits:.2f} bits a weight (6 for v_proj")


def test_no_mix_is_worse_than_what_is_uniform() -> None:
    part, harms = wide("q_proj", 0.1)
    assert best_mix([part], harms, UNIFORM, 4.2) is None  # no palettes between four bits and six
    assert best_mix([part], harms, UNIFORM, 1.5) is None


def test_larger_groups_are_for_channels_that_they_divide() -> None:
    """40 channels are five groups of 8, and no groups of 32."""
    weight = Weight("model.layers.0.q_proj.weight", (40, 1024), (40, 1024), "mlp")
    part = MixedPart((weight,), (weight.name,))
    mix = best_mix([part], {weight.name: 0.1}, UNIFORM, 8.0)
    assert mix is not None
    assert mix.names(UNIFORM.name) == {weight.name: "palette6-kmeans-group8"}


def test_one_bit_has_a_mix_too() -> None:
    part, harms = wide("q_proj", 0.1)
    mix = best_mix([part], harms, Palette(1, "kmeans", 8), 2.1)
    assert mix is not None and mix.formats == (Palette(2, "kmeans", 8),)


def test_a_mix_of_vectors_has_indices_of_8_bits_at_most() -> None:
    part, harms = wide("v_proj", 0.02)
    for bits, most in ((2, 2.6), (3, 3.6), (4, 4.6), (6, 6.2)):
        mix = best_mix([part], harms, Palette(2, "kmeans", None, 4), most)
        length = {2: 4, 3: 2, 4: 2, 6: 1}[bits]
        wanted = None if bits == 2 else Palette(bits, "kmeans", None, length)
        assert (mix and mix.formats[0]) == wanted


def names() -> list[str]:
    """All palettes that may be mixed, by the grammar of formats."""
    sizes = ["per-tensor", *(f"group{size}" for size in range(1, 65))]
    made = [f"palette{bits}-kmeans-{vector}{size}" for bits in ERRORS
            for vector in ("", "vector2-", "vector4-") for size in sizes]  # fmt: skip
    return [name for name in made if known(name)]


def known(name: str) -> bool:
    try:
        return parse_format(name).name == name
    except CetaneError:
        return False


def test_every_palette_has_other_widths_that_are_formats() -> None:
    found = names()
    assert "palette2-kmeans-vector4-group16" in found
    for name in found:
        uniform = parse_format(name)
        assert isinstance(uniform, Palette)
        for form in widths(uniform):
            assert parse_format(form.name) == form
            assert form.bits >= uniform.bits and 0 < error(form) <= error(uniform) * 1.01


def test_rows_of_one_tensor_cost_once() -> None:
    """A fused projection of three row ranges costs less than a plain one of the same size."""
    plain, harms = wide("down_proj", 0.005)
    whole = Weight("model.layers.0.qkv_proj.weight", (16, 1024), (64, 1024), "attention")
    cuts = [(0, 32), (32, 48), (48, 64)]
    rows = tuple(replace(whole, rows=cut, shape=(cut[1] - cut[0], 1024)) for cut in cuts)
    fused = MixedPart(rows, (whole.name,))
    mix = best_mix([fused, plain], harms | {whole.name: 0.004}, UNIFORM, 5.4)
    assert mix is not None
    assert [form.bits for form in mix.formats] == [4, 6]
    assert mix.harm == pytest.approx((0.004 + 0.005 * ERRORS[6] / ERRORS[4]) / 0.009)
