# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["coremltools==9.0", "numpy>=2.0,<2.4"]
# ///
"""Measure this kit's bundles on this machine: `uv run measure.py`, or `python measure.py`.

It needs Python, numpy and coremltools, and nothing else. It writes `measurements.json`, and goes on
where it stopped. `--help` lists its options.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.dont_write_bytecode = True  # a full disk would leave half a file, which stops the next run
    from measuring.run import main  # type: ignore[import-not-found]

    sys.exit(main(Path(__file__).resolve().parent, sys.argv[1:]))
