"""coremltools' own tests of MIL ops on our executor: one parametrisation of each test, of the
modules with the ops that tests/mil does not compare with numpy. They run in a process of their own,
because they are told that it is a Mac. benchmarks/coremltools_conformance.py runs all of them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
MODULES = [
    "iOS14/test_activation.py",
    "iOS14/test_control_flow.py",
    "iOS14/test_conv.py",
    "iOS14/test_image_resizing.py",
    "iOS14/test_normalization.py",
    "iOS14/test_pool.py",
    "iOS14/test_random.py",
    "iOS14/test_recurrent.py",
    "iOS14/test_tensor_operation.py",
    "iOS14/test_tensor_transformation.py",
    "iOS15/test_image_resizing.py",
    "iOS16/test_constexpr_ops.py",
    "iOS16/test_image_resizing.py",
    "iOS17/test_image_resizing.py",
    "iOS17/test_quantization.py",
    "iOS17/test_scatter_gather.py",
    "iOS18/test_compression.py",
    "iOS18/test_recurrent.py",
    "iOS18/test_states.py",
    "iOS18/test_transformers.py",
]

# docs/reference/conformance.md explains each.
KNOWN = {
    "TestConv::test_type_inference_dynamic_x_with_groups",  # these three predict with a
    "TestSliceByIndex::test_slice_by_index",  # neural network, not an ML program
    "TestSliceByIndex::test_slice_by_index_slice_squeeze_separate",
    "TestNormalizationLocalResponseNorm::test_builder_to_backend_smoke",
    "TestResample::test_builder_to_backend_smoke",  # counts casts of a float16 conversion
    "TestCropResize::test_builder_to_backend_smoke",
    "TestCropResize::test_builder_to_backend_ios16",
    "TestCropResize::test_builder_to_backend_ios17",
    "TestScatter::test_ios17_invalid_indices",
}


def test_coremltools_own_tests(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("coremltools")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    tests = [str(package / "converters/mil/mil/ops/tests" / module) for module in MODULES]
    results = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-p", "conformance_plugin", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, f"--rootdir={package.parent}", "-q", "--tb=short", "-W", "ignore"]
    command += ["-k", "not efficient_type_inference"]  # it asks 10 ms of the clock, also when busy
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks")]),
        "CONFORMANCE_PER_TEST": "1",
        "CONFORMANCE_RESULTS": str(results),
        "RUN_BACKWARD_COMPATIBILITY": "0",
    }
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    run = subprocess.run(
        [*command, *tests], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    outcomes = [json.loads(line) for line in results.read_text().splitlines()]
    passed = sum(test["outcome"] in ("passed", "xpassed") for test in outcomes)
    failed = {
        test["test"].partition("::")[2].partition("[")[0]: test["reason"]
        for test in outcomes
        if test["outcome"] == "failed"
    }
    assert failed.keys() <= KNOWN, f"{failed}\n{run.stdout[-3000:]}"
    assert passed > 200, run.stdout[-3000:]
