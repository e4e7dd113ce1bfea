"""Open a GGUF with its tokenizer: with an empty cache, then cached, each in a fresh process."""

import json
import os
import subprocess
import sys
import tempfile

from common import arguments, report

SCRIPT = """
import json, sys, time
start = time.perf_counter()
from cetane.checkpoint import open_checkpoint
imported = time.perf_counter()
open_checkpoint(sys.argv[1]).tokenizer.encode("Hello")
print(json.dumps([imported - start, time.perf_counter() - imported]))
"""


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    rows, result = [], {}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"CETANE_CACHE": cache}
        for name in ("first", "cached"):
            output = subprocess.run(
                [sys.executable, "-c", SCRIPT, options.model],
                env=environment, check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
            imports, opening = json.loads(output)
            rows.append([name, imports, opening, imports + opening])
            result[f"{name}_seconds"] = imports + opening
    report("open a GGUF and its tokenizer", ["run", "import s", "open s", "total s"], rows,
           result, options.json)  # fmt: skip


if __name__ == "__main__":
    main()
