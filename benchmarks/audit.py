"""Audit a package of 200 MB, whole process, against the time that may take."""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from cetane.hardware.quiet import import_coremltools
from common import WORK, report

ct = import_coremltools()

from coremltools.converters.mil import Builder as mb  # noqa: E402
from coremltools.converters.mil.mil import types  # noqa: E402

WIDTH, CONVOLUTIONS, LIMIT = 4096, 12, 3.0


def write_package(path: Path) -> None:
    """Twelve int8 convolutions of 4096 to 4096 channels, each with a norm, an activation and a
    residual."""
    random = np.random.default_rng(1)
    shape = (WIDTH, WIDTH, 1, 1)

    @mb.program(
        input_specs=[mb.TensorSpec((1, WIDTH, 1, 1), types.fp16)], opset_version=ct.target.iOS18
    )
    def program(x: Any) -> Any:
        for _ in range(CONVOLUTIONS):
            weight = mb.constexpr_blockwise_shift_scale(
                data=random.integers(-127, 128, shape, np.int8),
                scale=np.full((WIDTH, 1, 1, 1), 1e-3, np.float16),
            )
            y = mb.layer_norm(x=x, axes=[1], epsilon=np.float16(1e-3))
            x = mb.add(x=x, y=mb.silu(x=mb.conv(x=y, weight=weight)))
        return x

    model = ct.convert(
        program, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS18,
        pass_pipeline=ct.PassPipeline.EMPTY, skip_model_load=True,
    )  # fmt: skip
    model.save(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", nargs="?", type=Path, help="another package than the made one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    path = options.package or WORK / "audit.mlpackage"
    if not path.exists():
        WORK.mkdir(parents=True, exist_ok=True)
        write_package(path)
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    cetane = [sys.executable, "-c", "from cetane.cli import main; main()"]
    command = [*cetane, "audit", str(path), "--json"]
    seconds = []
    for _ in range(options.rounds):
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - started)
        if done.returncode not in (0, 1):
            raise SystemExit(done.stderr)
    median = sorted(seconds)[len(seconds) // 2]
    result = {"megabytes": size / 1e6, "seconds": median, "worst": max(seconds), "limit": LIMIT}
    rows = [[path.name, size / 1e6, median, max(seconds), LIMIT]]
    columns = ["package", "MB", "median s", "worst s", "limit s"]
    report("cetane audit, whole process", columns, rows, result, options.json)
    raise SystemExit(0 if median <= LIMIT else 1)


if __name__ == "__main__":
    main()
