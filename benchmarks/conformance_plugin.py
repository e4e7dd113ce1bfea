"""A pytest plugin that runs coremltools' own tests on our executor.

It is loaded before coremltools' test modules, because they ask at import whether this is a Mac: it
installs the bridge, answers that question with yes, and then deselects what is not about ML
programs, draws a sample, and records how each test went. Options come from the environment, for
they must be known at import:

    CONFORMANCE_LIMIT      at most this many tests of each module, drawn with a fixed seed (0: all)
    CONFORMANCE_PER_TEST   at most this many parametrisations of each test, drawn alike (0: all)
    CONFORMANCE_PRECISION  "fp32" or "fp16" (see `cetane.bridge.install`)
    CONFORMANCE_FAST       "1": onnxruntime where it can
    CONFORMANCE_RESULTS    a file for one JSON line per test
"""

import asyncio
import gc
import importlib.util
import inspect
import json
import logging
import os
import platform
import random
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("PYMIL_TEST_TARGETS", "mlprogram")
os.environ.setdefault("INCLUDE_MIL_FP32_UNIT_TESTS", "1")
os.environ.setdefault("RUN_BACKWARD_COMPATIBILITY", "1")

import numpy as np
import pytest
import torch

from cetane import bridge
from cetane.bridge.patches import MACOS
from cetane.quiet import import_coremltools

SEED = 20260
LIMIT = int(os.environ.get("CONFORMANCE_LIMIT", "0"))
PER_TEST = int(os.environ.get("CONFORMANCE_PER_TEST", "0"))
RESULTS = os.environ.get("CONFORMANCE_RESULTS", "")

import_coremltools()
logging.getLogger("coremltools").setLevel(logging.WARNING)  # tests read its warnings
bridge.install(
    os.environ.get("CONFORMANCE_PRECISION", "fp32"), os.environ.get("CONFORMANCE_FAST") == "1"
)

import coremltools._deps  # noqa: E402
import coremltools.models.utils  # noqa: E402

coremltools._deps._IS_MACOS = True
coremltools.models.utils._is_macos = lambda: True
coremltools.models.utils._macos_version = lambda: MACOS
platform.machine = lambda: "arm64"  # tests know what Core ML cannot do on Intel


class _Missing(ModuleType):
    """Stands in for a library that test modules import for the sake of a few tests: those skip."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(self.__name__)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return pytest.skip(f"needs {self.__name__}")


for library in ("peft", "torchvision"):
    if importlib.util.find_spec(library) is None:
        sys.modules[library] = _Missing(library)

OTHER_BACKENDS = re.compile(r"neuralnetwork|iOS14\b")

# coremltools compares the results of its "fp32" backends at 1e-4, even where the test asks for a
# float16 program, whose results are spaced wider. The same tests run in the "fp16" backend too.
FLOAT32 = re.compile(r"precision='fp32'|'mlprogram', 'fp32'")
FLOAT16 = re.compile(r"numpy.float16|=fp16\b")


def pytest_make_parametrize_id(val: object, argname: str) -> str:
    """Names that say what the parameters are, as some of coremltools' modules have them."""
    return f"{argname}={val}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is about ML programs; of each module, a sample."""
    gc.freeze()  # coremltools collects garbage in every conversion
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        name, _, parameters = item.nodeid.partition("[")
        mixed = FLOAT32.search(parameters) and FLOAT16.search(parameters)
        if not OTHER_BACKENDS.search(parameters) and not mixed:
            tests[name].append(item)
    modules: dict[str, list[pytest.Item]] = defaultdict(list)
    for name, parametrisations in tests.items():
        modules[name.partition("::")[0]] += _sample(parametrisations, PER_TEST)
    kept = {id(item) for module in modules.values() for item in _sample(module, LIMIT)}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _sample(items: list[pytest.Item], limit: int) -> list[pytest.Item]:
    return random.Random(SEED).sample(items, limit) if 0 < limit < len(items) else items


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random inputs in every run and in every order."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run coroutines, so that no plugin is needed for them."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator:
    """Add the reason to the report, in one line, for the process that records it."""
    report = yield
    reason = ""
    if call.excinfo is not None:
        message = str(call.excinfo.value).strip() or repr(call.excinfo.value)
        reason = f"{call.excinfo.typename}: {message}"
    elif isinstance(getattr(report, "wasxfail", None), str):
        reason = report.wasxfail
    report.user_properties = [*report.user_properties, ("reason", reason[:2000])]
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One line per test, written by the process that started the others."""
    if not RESULTS or "PYTEST_XDIST_WORKER" in os.environ:
        return
    failed_early = report.when != "call" and report.outcome == "failed"
    if report.when != "call" and not failed_early and report.outcome != "skipped":
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.outcome == "skipped" else "xpassed"  # type: ignore[assignment]
    line = {
        "test": report.nodeid,
        "outcome": outcome,
        "seconds": round(report.duration, 3),
        "reason": dict(report.user_properties).get("reason", ""),
    }
    with Path(RESULTS).open("a") as file:
        file.write(json.dumps(line) + "\n")
