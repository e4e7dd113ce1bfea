"""Memory that is freed goes back to the system."""

import subprocess
import sys

import pytest

FREED = """
import numpy as np
from cetane.hardware.memory import keep_little

def own():
    (line,) = [l for l in open("/proc/self/status") if l.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

def grow_and_free():
    np.ones(31 << 20, np.uint8)  # after that, glibc puts smaller arrays among all others
    arrays = [np.ones(6 << 20, np.uint8) for _ in range(20)]
    last = np.ones(1 << 20, np.uint8)
    del arrays
    return last

KEEP
before = own()
last = grow_and_free()
print(own() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's options")
@pytest.mark.parametrize("keeps_little", [False, True])
def test_large_arrays_do_not_stay(keeps_little: bool) -> None:
    code = FREED.replace("KEEP", "keep_little()" if keeps_little else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept = int(done.stdout)
    assert kept < 8 << 20 if keeps_little else kept > 100 << 20
