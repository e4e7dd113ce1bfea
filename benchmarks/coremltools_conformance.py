"""Run coremltools' own tests on our executor, by the bridge.

    python benchmarks/coremltools_conformance.py [--modules WORD ...] [--limit N] [--jobs N]

The coremltools wheel ships its tests, but they predict only on a Mac. Here they run with the
bridge installed and told that this is one (see conformance_plugin.py). Writes a table of modules,
classes of failure with a reason each, and every failing test as JSON, and the table between the
markers of docs/conformance.md.

Needs packages that this project does not: they are installed into build/conformance/packages by
the first run (coremltools 9.0 cannot convert some models with NumPy >= 2.4, and its k-means needs
scikit-learn).
"""

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from rich.table import Table

from common import console

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build/conformance"
DOCUMENT = ROOT / "docs/conformance.md"
PACKAGES = ["numpy>=2.2,<2.4", "scikit-learn", "scipy"]

# What applies to ML programs, and how many tests of each module are drawn if not all are.
SUITES = {
    "converters/mil/mil/ops/tests/iOS14": 0,
    "converters/mil/mil/ops/tests/iOS15": 0,
    "converters/mil/mil/ops/tests/iOS16": 0,
    "converters/mil/mil/ops/tests/iOS17": 0,
    "converters/mil/mil/ops/tests/iOS18": 0,
    "converters/mil/frontend/torch/test/test_torch_ops.py": 4000,
    "converters/mil/frontend/torch/test/test_torch_quantization_ops.py": 500,
    "converters/mil/frontend/torch/test/test_torch_stateful_model.py": 0,
    "converters/mil/frontend/torch/test/test_torch_conversion_api.py": 0,
    "converters/mil/test_inputs_outputs_shape.py": 0,
    "optimize/coreml/experimental": 0,
    "test/optimize/coreml": 500,
    "test/ml_program": 0,
    "test/modelpackage/test_modelpackage.py": 0,
}

# (pattern of the reason, pattern of the test, class, whether the test is one for this machine)
CLASSES = [
    ("MLComputePlan|compute devices|MLModelStructure|RemoteDevice|Xcode|xcrun|devicectl", "",
     "needs a device, or Core ML's planner", False),
    ("only ML programs run here|holds no ML program|was not loaded or compiled with", "",
     "an older model type (neural network, regressor, ...), not an ML program", False),
    ("model.mil", "", "reads files inside Core ML's private compiled format", False),
    ("needs torchvision|torchvision", "", "needs torchvision", False),
    ("ModuleNotFoundError|ImportError|needs \\w+", "", "needs a package that is not there", False),
    ("running_mean and running_var must|qnnpack|NoQEngine", "",
     "torch refuses the model before anything is converted", False),
    ("only 0-dimensional arrays|only length-1 arrays", "",
     "coremltools' converter fails with this NumPy", False),
    ("assert \\d == \\d", "fp32", "counts the casts of a float16 conversion", False),
    ("make_float|\\['constexpr_.*==", "fp32",
     "expects casts that coremltools' float32 conversion does not make", False),
    ("rtol=1e-07, atol=0", "post_training",
     "compares fp16 and decoded weights exactly: passes with --precision fp16", True),
    ("initial_h|size of tensor a", "PackedSequence",
     "an lstm whose initial state does not fit its batch", True),
    ("mps devices", "", "needs a device, or Core ML's planner", False),
    ("7.899|0.00099993", "TestCropResize", "its expected value is rounded to three digits", False),
    ("Not equal", "TestCropResize.*smoke", "a box outside of the image: undocumented", True),
    ("Not equal", "LocalResponseNorm.*smoke",
     "its literal contradicts the op's formula (and the same module's test against torch)", True),
    ("DID NOT RAISE", "invalid_indices", "expects that an undefined result is wrong", False),
]  # fmt: skip


def main() -> None:
    """Run the suites one after the other, then write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modules", nargs="*", default=[], help="only suites with a word in them")
    parser.add_argument("--limit", type=int, help="at most so many tests of each module")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "fp16"])
    parser.add_argument("--fast", action="store_true", help="onnxruntime where it can")
    parser.add_argument("--seconds", type=int, default=3600, help="time for one suite")
    parser.add_argument("--report", action="store_true", help="only write the report again")
    options = parser.parse_args()
    if not options.report:
        install_packages()
        for suite, limit in SUITES.items():
            if not options.modules or any(word in suite for word in options.modules):
                run(suite, limit if options.limit is None else options.limit, options)
    write(collect())


def install_packages() -> None:
    """Into a folder of their own, once."""
    target = WORK / "packages"
    if not target.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        subprocess.run([*pip, *PACKAGES], check=True)


def run(suite: str, limit: int, options: argparse.Namespace) -> None:
    """One suite in processes of its own; its results go to a file of JSON lines."""
    spec = importlib.util.find_spec("coremltools")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    results = WORK / f"{suite.replace('/', '.')}.jsonl"
    results.parent.mkdir(parents=True, exist_ok=True)
    results.unlink(missing_ok=True)
    scratch = WORK / "scratch"  # some tests write into the current folder
    scratch.mkdir(exist_ok=True)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(WORK / "packages"), str(Path(__file__).parent)]),
        "CONFORMANCE_RESULTS": str(results),
        "CONFORMANCE_LIMIT": str(limit),
        "CONFORMANCE_PRECISION": options.precision,
        "CONFORMANCE_FAST": str(int(options.fast)),
    }
    command = [sys.executable, "-m", "pytest", "-p", "conformance_plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, f"--rootdir={package.parent}", "-q", "--tb=no", "-W", "ignore"]
    command += ["-n", str(options.jobs)] if options.jobs > 1 else []
    command += ["--continue-on-collection-errors", str(package / suite)]
    console.print(f"{suite} ...")
    try:
        subprocess.run(
            command,
            cwd=scratch,
            env=environment,
            timeout=options.seconds,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        console.print(f"{suite}: stopped after {options.seconds} s")


def collect() -> dict[str, Any]:
    """The results of all suites that ran, as the report has them."""
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    classes: dict[str, dict[str, Any]] = {}
    failures = []
    for file in sorted(WORK.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            test = json.loads(line)
            module = test["test"].partition("coremltools/")[2].partition("::")[0]
            outcome = test["outcome"]
            if outcome == "failed":
                name, counts = classify(test)
                entry = classes.setdefault(name, {"tests": 0, "counts": counts, "example": test})
                entry["tests"] += 1
                failures.append(test)
                outcome = "failed" if counts else "not here"
            modules[module][outcome] += 1
    total = sum(modules.values(), Counter())
    ran = total["passed"] + total["xpassed"] + total["failed"]
    rate = (total["passed"] + total["xpassed"]) / ran if ran else 0.0
    return {
        "modules": {name: dict(counts) for name, counts in sorted(modules.items())},
        "total": dict(total),
        "pass_rate": rate,
        "classes": classes,
        "failures": failures,
    }


def classify(test: dict[str, Any]) -> tuple[str, bool]:
    """The class of a failure, and whether it counts as ours."""
    for reason, name, title, counts in CLASSES:
        if re.search(reason, test["reason"]) and re.search(name, test["test"]):
            return title, counts
    return "other", True


def write(report: dict[str, Any]) -> None:
    """The report as JSON, on the screen, and in the documentation."""
    (WORK / "report.json").write_text(json.dumps(report, indent=1))
    columns = ["passed", "failed", "xpassed", "xfailed", "skipped", "not here"]
    rows = [
        [module, *(str(counts.get(column, 0)) for column in columns)]
        for module, counts in [*report["modules"].items(), ("all", report["total"])]
    ]
    table = Table("module", *columns, title=f"{100 * report['pass_rate']:.2f} % pass")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    lines = [
        f"**{100 * report['pass_rate']:.2f} %** of the tests for this machine pass.",
        "",
        f"| module | {' | '.join(columns)} |",
        f"|---|{'---:|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        "| class of failure | tests | counted |",
        "|---|---:|---|",
        *(
            f"| {name} | {entry['tests']} | {'yes' if entry['counts'] else 'no'} |"
            for name, entry in report["classes"].items()
        ),
    ]
    begin, end = "<!-- begin results -->", "<!-- end results -->"
    text = DOCUMENT.read_text(encoding="utf-8")
    before, after = text.partition(begin)[0], text.partition(end)[2]
    DOCUMENT.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


if __name__ == "__main__":
    main()
