"""Products on a processor that has none of the instructions that this one may have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import numpy as np
from cetane.mil.fast.emit import FEATURES, LANES
from cetane.mil.fast.tape.products import multiply
from cetane.mil.fast.tape.rounded import rounds
from cetane.mil.fast.tape.weights import _bytes, _looked_up
from cetane.mil.fast.forms import DOTTED, FLOATING, READABLE, WeightForm

plain = {WeightForm.FLOATS, WeightForm.HALVES, WeightForm.BYTES, WeightForm.SCALED_BYTES}
assert LANES == 8 and not DOTTED and READABLE == FLOATING
assert READABLE == (plain | {WeightForm.NIBBLES} if FEATURES.get("avx2") else plain)
assert not rounds(int(WeightForm.BYTES))
rng = np.random.default_rng(0)
steps, scale = rng.integers(-127, 128, (8, 64)), rng.random(8).astype(np.float32)
rows = _bytes(WeightForm.BYTES, steps, scale, np.empty((0, 0), np.float32)).grouped()
x, y = rng.standard_normal((3, 64)).astype(np.float32), np.empty((3, 8), np.float32)
places = [a.ctypes.data for a in (rows.data, rows.scale, rows.tables, rows.palette_ids)]
multiply(1, 0, 8, y.ctypes.data, 8, x.ctypes.data, 64, 3, places[0], 64, *places[1:], 64)
np.testing.assert_allclose(y, x @ (steps * scale[:, None]).T, rtol=1e-5, atol=1e-4)
if FEATURES.get("avx2"):
    indices, palettes = rng.integers(0, 16, (8, 64)), rng.standard_normal((2, 16))
    palette_ids = np.arange(2, dtype=np.int32)
    entries = palettes.astype(np.float32)
    rows = _looked_up(WeightForm.NIBBLES, indices, scale, entries, palette_ids).grouped()
    places = [a.ctypes.data for a in (rows.data, rows.scale, rows.tables, rows.palette_ids)]
    multiply(3, 0, 8, y.ctypes.data, 8, x.ctypes.data, 64, 3, places[0], 32, *places[1:], 64)
    values = np.take_along_axis(palettes.repeat(4, axis=0), indices, 1) * scale[:, None]
    np.testing.assert_allclose(y, x @ values.T, rtol=1e-5, atol=1e-4)
"""


@pytest.mark.parametrize(
    ("name", "features"),
    [("generic", ""), ("haswell", "+sse3,+ssse3,+sse4.1,+sse4.2,+avx,+avx2,+fma,+f16c")],
)
def test_a_processor_without_words(tmp_path: Path, name: str, features: str) -> None:
    """What it cannot read is not compiled, and what it can is right."""
    given = {
        "NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(tmp_path),
    }  # fmt: skip
    environment = os.environ | given
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
