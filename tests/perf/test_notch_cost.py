"""The 1 MiB notch, by hand from the shapes it was published for."""

import pytest

from cetane.hardware.chips import find_chip
from cetane.perf.cost import load_fit
from cetane.perf.notch_cost import cost, hit_bytes
from cetane.perf.shapes import load_decoders


@pytest.mark.parametrize(
    ("shape", "bits", "hit"),
    [
        ((4096, 2048), 16, True),  # an expert of ZAYA, gate and up: 256 x 2048 x 2 is 1 MiB
        ((2048, 2048), 16, False),  # half a MiB
        ((4096, 2048), 8, False),
        ((8192, 2048), 8, True),  # the MLP of Llama-3.2-1B, at a byte a weight
        ((16384, 3072), 8, True),  # Phi-4-mini's fused gate and up: 3 MiB
        ((9216, 2304), 16, False),  # ane-book P077, fast: 2.53 MiB
        ((4096, 2048, 1, 1), 16, True),
        ((4097, 2048), 16, True),  # 257 rows: 4 KiB over
        ((4096 + 16 * 5, 2048), 16, False),  # 20 KiB over
        ((100, 64), 16, False),  # nearly nothing is no multiple
    ],
)
def test_hits(shape: tuple[int, ...], bits: int, hit: bool) -> None:
    assert bool(hit_bytes([shape], bits)) is hit


def test_bytes_and_cost() -> None:
    assert hit_bytes([(4096, 2048), (2048, 2048)], 16) == 2 * 4096 * 2048
    rates, chip = load_fit().rates, find_chip("m4-max")
    slow = 2 * 4096 * 2048 * (1 / 23 - 1 / rates["half"].value) * 1e-6
    assert cost([(4096, 2048), (2048, 2048)], chip, rates) == pytest.approx(slow)
    assert cost([(2048, 2048)], chip, rates) == 0


def test_matrices_are_all_weights() -> None:
    for name, model in load_decoders().items():
        if not model.per_layer and not model.experts:
            layers = [model.layer(index) for index in range(model.layers)]
            weights = sum(layer.attention + layer.mlp for layer in layers) + model.head
            assert sum(o * i for o, i in model.matrices()) == weights, name
