"""Products on a processor that has none of the instructions that this one may have."""

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import numpy as np
from cetane.mil.fast.emit import LANES
from cetane.mil.fast.tape.products import multiply
from cetane.mil.fast.tape.rounded import rounds
from cetane.mil.fast.tape.weights import _bytes
from cetane.mil.fast.vectors import READABLE, Form

assert LANES == 8 and READABLE == {Form.FLOATS, Form.HALVES, Form.BYTES, Form.SCALED_BYTES}
assert not rounds(int(Form.BYTES), 64)
rng = np.random.default_rng(0)
steps, scale = rng.integers(-127, 128, (8, 64)), rng.random(8).astype(np.float32)
rows = _bytes(Form.BYTES, steps, scale, np.empty((0, 0), np.float32)).grouped()
x, y = rng.standard_normal((3, 64)).astype(np.float32), np.empty((3, 8), np.float32)
places = [a.ctypes.data for a in (rows.data, rows.scale, rows.more, rows.which)]
multiply(1, 0, 8, y.ctypes.data, 8, x.ctypes.data, 64, 3, places[0], 64, *places[1:], 64)
np.testing.assert_allclose(y, x @ (steps * scale[:, None]).T, rtol=1e-5, atol=1e-4)
"""


def test_a_processor_without_look_ups(tmp_path: Path) -> None:
    """What it cannot read is not compiled, and what it can is right."""
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_CACHE_DIR": tmp_path}
    environment = os.environ | {name: str(value) for name, value in plain.items()}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, check=True)
