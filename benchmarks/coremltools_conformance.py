"""Run coremltools' own tests on our executor, by the bridge.

    python benchmarks/coremltools_conformance.py [--modules WORD ...] [--limit N] [--jobs N]

The coremltools wheel ships its tests, but they predict only on a Mac. Here they run with the
bridge installed and told that this is one (see conformance_plugin.py). It writes as JSON a table of
modules, classes of failure with a reason each, and every failing test. The tables also go between
the markers of docs/reference/conformance.md.

A run that was interrupted, or that had a smaller limit, is continued: tests with a result are not
run again. Results lie in a folder for each precision and executor under build/conformance; remove
it to start afresh. A test that takes too long, or takes its process down, has failed, and the next
process goes on after it. A process that has grown large is replaced.

It needs packages that this project does not: coremltools 9.0 cannot convert some models with
NumPy >= 2.4, and its k-means needs scikit-learn. The first run installs them into
build/conformance/packages.
"""

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event
from typing import BinaryIO

from pytest import ExitCode

from common import console
from conformance_report import results_in, write_report

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/conformance"
DOCUMENT = ROOT / "docs/reference/conformance.md"
PACKAGES = ["numpy>=2.2,<2.4", "scikit-learn", "scipy"]
MEMORY = 2 * 2**30  # bytes at which a process is replaced

# What applies to ML programs.
SUITES = [
    "converters/mil/mil/ops/tests/coreml_dialect",
    "converters/mil/mil/ops/tests/iOS14",
    "converters/mil/mil/ops/tests/iOS15",
    "converters/mil/mil/ops/tests/iOS16",
    "converters/mil/mil/ops/tests/iOS17",
    "converters/mil/mil/ops/tests/iOS18",
    "converters/mil/frontend/torch/test/test_torch_ops.py",
    "converters/mil/frontend/torch/test/test_torch_quantization_ops.py",
    "converters/mil/frontend/torch/test/test_torch_stateful_model.py",
    "converters/mil/frontend/torch/test/test_torch_conversion_api.py",
    "converters/mil/test_inputs_outputs_shape.py",
    "optimize/coreml/experimental",
    "test/optimize/coreml",
    "test/ml_program",
    "test/modelpackage/test_modelpackage.py",
]


def main() -> None:
    """Run the suites one after the other, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", nargs="*", default=[], help="only suites with a word in them")
    parser.add_argument("--limit", type=int, default=0, help="at most so many tests of each module")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "fp16"])
    parser.add_argument("--fast", action="store_true", help="onnxruntime where it can")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then, to be continued")
    parser.add_argument("--retry", action="store_true", help="run tests again that failed")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    options = parser.parse_args()
    folder = WORK / (options.precision + ("-fast" if options.fast else ""))
    folder.mkdir(parents=True, exist_ok=True)
    if not options.report:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends the processes too
        install_packages()
        deadline = time.monotonic() + 60 * options.minutes
        try:
            for suite in SUITES:
                wanted = not options.modules or any(word in suite for word in options.modules)
                if wanted and time.monotonic() < deadline:
                    Suite(suite, folder, options).run(deadline)
        except KeyboardInterrupt:
            sys.exit("stopped; the same command goes on from here")
    write_report(folder, DOCUMENT)


def install_packages() -> None:
    """Into a folder of their own, once."""
    target = WORK / "packages"
    if not target.exists():
        unfinished = WORK / "packages.part"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(unfinished)]
        subprocess.run([*pip, "--upgrade", *PACKAGES], check=True)
        unfinished.rename(target)


class Suite:
    """A file or folder of coremltools' tests, run in processes of its own."""

    def __init__(self, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.name = name
        self.results = folder / f"{name.removesuffix('.py').replace('/', '-')}.jsonl"
        self.options = options
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.stopped = Event()

    def run(self, deadline: float) -> None:
        """Until every test that is drawn has a result, or the time is over."""
        if self.options.retry:
            kept = [test for test in results_in(self.results) if test["outcome"] != "failed"]
            self.results.write_text("".join(json.dumps(test) + "\n" for test in kept))
        with ThreadPoolExecutor(self.options.jobs) as pool:
            shares = [pool.submit(self._run_share, share) for share in range(self.options.jobs)]
            try:
                while (left := deadline - time.monotonic()) > 0 and wait(
                    shares, min(30.0, left)
                ).not_done:
                    self._print_progress()
            finally:
                self.stopped.set()
                for process in self.processes.values():
                    process.kill()
        for share in shares:
            share.result()
        self._print_progress()

    def _run_share(self, share: int) -> None:
        """One process after the other, until one has run all that is left of its share."""
        running, log, scratch = (
            self.results.with_suffix(f".{share}.{what}") for what in ("running", "log", "scratch")
        )
        while not self.stopped.is_set():
            running.unlink(missing_ok=True)
            scratch.mkdir(exist_ok=True)
            with log.open("wb") as output:
                process = self.processes[share] = self._start(share, scratch, output)
                code = process.wait()
            shutil.rmtree(scratch)
            lost = running.read_text() if running.exists() else ""
            match code:
                case _ if self.stopped.is_set():
                    return
                case ExitCode.INTERRUPTED if not lost:
                    continue  # it has grown large
                case _ if lost:
                    self._record_lost(lost, code)
                case ExitCode.OK | ExitCode.TESTS_FAILED | ExitCode.NO_TESTS_COLLECTED:
                    return
                case _:
                    console.print(f"{self.name}: pytest ended with {code}, see {log}")
                    return

    def _start(self, share: int, scratch: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
        """A process that works in `scratch`: some tests write into the current folder."""
        spec = importlib.util.find_spec("coremltools")
        assert spec is not None and spec.origin is not None
        package = Path(spec.origin).parent
        paths = [WORK / "packages", ROOT / "src", ROOT / "benchmarks"]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONHASHSEED": "0",  # some parametrisations come from sets
            "TMPDIR": str(scratch),
            "CONFORMANCE_RESULTS": str(self.results),
            "CONFORMANCE_LIMIT": str(self.options.limit),
            "CONFORMANCE_SHARE": f"{share}/{self.options.jobs}",
            "CONFORMANCE_MEMORY": str(MEMORY),
            "CONFORMANCE_PRECISION": self.options.precision,
            "CONFORMANCE_FAST": str(int(self.options.fast)),
        }
        command = [sys.executable, "-m", "pytest", "-p", "conformance_plugin"]
        command += ["-c", os.devnull, f"--rootdir={package.parent}", "-p", "no:cacheprovider"]
        command += ["-q", "--tb=no", "-W", "ignore", "--continue-on-collection-errors"]
        command += ["-o", f"faulthandler_timeout={self.options.timeout}"]
        command += ["-o", "faulthandler_exit_on_timeout=true", str(package / self.name)]
        return subprocess.Popen(
            command, cwd=scratch, env=environment, stdout=log, stderr=log, start_new_session=True
        )

    def _record_lost(self, test: str, code: int) -> None:
        reason = f"Lost: its process ended with {code}"
        if code == 1:  # faulthandler's
            reason = f"Lost: took longer than {self.options.timeout} s"
        line = {"test": test, "outcome": "failed", "seconds": 0.0, "reason": reason}
        with self.results.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _print_progress(self) -> None:
        tests = results_in(self.results)
        counts = self.results.with_suffix(".collected.json")
        modules = json.loads(counts.read_text()).values() if counts.exists() else []
        drawn = sum(module["drawn"] for module in modules)
        failed = sum(test["outcome"] == "failed" for test in tests)
        console.print(f"{self.name}: {len(tests)} of {drawn} tests ran, {failed} failed")


if __name__ == "__main__":
    main()
