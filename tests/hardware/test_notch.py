"""The 1 MiB notch, by hand from the shapes it was published for."""

import pytest

from cetane.hardware.notch import on_notch


@pytest.mark.parametrize(
    ("outputs", "contracted", "bits", "hit"),
    [
        (4096, 2048, 16, True),  # an expert of ZAYA, gate and up: 256 x 2048 x 2 is 1 MiB
        (2048, 2048, 16, False),  # half a MiB
        (4096, 2048, 8, False),
        (8192, 2048, 8, True),  # the MLP of Llama-3.2-1B, at a byte a weight
        (16384, 3072, 8, True),  # Phi-4-mini's fused gate and up: 3 MiB
        (9216, 2304, 16, False),  # ane-book P077, fast: 2.53 MiB
        (4097, 2048, 16, True),  # 257 rows: 4 KiB over
        (4096 + 16 * 5, 2048, 16, False),  # 20 KiB over
        (100, 64, 16, False),  # nearly nothing is no multiple
    ],
)
def test_hits(outputs: int, contracted: int, bits: int, hit: bool) -> None:
    assert on_notch(outputs, contracted, bits) is hit
