"""A pytest plugin that runs coremltools' own tests on our executor.

It is loaded before coremltools' test modules, because they ask at import whether this is a Mac. It
installs the bridge, and answers that question with yes. Then it deselects what is not about ML
programs, draws a sample, and records how each test went. Options come from the environment, for
they must be known at import:

    CONFORMANCE_LIMIT      at most this many tests of each module, drawn with a fixed seed (0: all)
    CONFORMANCE_PER_TEST   at most this many parametrisations of each test, drawn alike (0: all)
    CONFORMANCE_SHARE      "1/3": of that, what falls to the second of three processes
    CONFORMANCE_MEMORY     stop, to be started again, when the process has grown to so many bytes
    CONFORMANCE_PRECISION  "fp32" or "fp16" (see `cetane.bridge.install`)
    CONFORMANCE_FAST       "1": onnxruntime where it can
    CONFORMANCE_RESULTS    a file for one JSON line per test; tests that it has are not run again

Beside the results lies `*.collected.json`, the number of tests of each module. While a test runs,
`*.SHARE.running` has its name. It stays behind if the test took the process with it.
"""

import asyncio
import atexit
import gc
import importlib.util
import inspect
import json
import logging
import os
import platform
import random
import re
import shutil
import sys
import tempfile
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

SEED = 20260
LIMIT = int(os.environ.get("CONFORMANCE_LIMIT", "0"))
PER_TEST = int(os.environ.get("CONFORMANCE_PER_TEST", "0"))
SHARE, SHARES = map(int, os.environ.get("CONFORMANCE_SHARE", "0/1").split("/"))
MEMORY = int(os.environ.get("CONFORMANCE_MEMORY", "0"))
RESULTS = Path(os.environ.get("CONFORMANCE_RESULTS", os.devnull))
COLLECTED = RESULTS.with_suffix(".collected.json")
RUNNING = RESULTS.with_suffix(f".{SHARE}.running")
RECORDS = "CONFORMANCE_RESULTS" in os.environ

# A folder for what the tests leave behind; pytest's own temporary folders stay outside of it.
os.environ["PYTEST_DEBUG_TEMPROOT"] = tempfile.gettempdir()
SCRATCH = Path(tempfile.mkdtemp(prefix="conformance-"))
tempfile.tempdir = os.environ["TMPDIR"] = str(SCRATCH)
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

bridge.install(
    os.environ.get("CONFORMANCE_PRECISION", "fp32"), os.environ.get("CONFORMANCE_FAST") == "1"
)

import coremltools._deps  # noqa: E402
import coremltools.models.utils  # noqa: E402

logging.getLogger("coremltools").setLevel(logging.WARNING)  # tests read its warnings
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

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
OTHER_BACKENDS = re.compile(r"neuralnetwork|iOS14\b")

# coremltools compares the results of its "fp32" backends at 1e-4, even where the test asks for a
# float16 program, whose results are spaced wider. The same tests run in the "fp16" backend too.
FLOAT32 = re.compile(r"precision='fp32'|'mlprogram', 'fp32'")
FLOAT16 = re.compile(r"numpy.float16|=fp16\b")


@pytest.hookimpl(tryfirst=True)
def pytest_make_parametrize_id(val: object, argname: str) -> str:
    """Names that say what the parameters are, as some of coremltools' modules have them. They hold
    no addresses, so a test is known by its name in the next process."""
    return f"{argname}={ADDRESS.sub('', str(val))}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep what is about ML programs; of each module, a sample; of that, what was not run yet."""
    gc.freeze()  # coremltools collects garbage in every conversion
    modules: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        name, _, parameters = item.nodeid.partition("[")
        mixed = FLOAT32.search(parameters) and FLOAT16.search(parameters)
        if not OTHER_BACKENDS.search(parameters) and not mixed:
            modules[name.partition("::")[0]][name].append(item)
    drawn = {module: _sample(list(tests.values())) for module, tests in modules.items()}
    if RECORDS:
        counts = {
            module: {"collected": sum(map(len, tests.values())), "drawn": len(drawn[module])}
            for module, tests in modules.items()
        }
        COLLECTED.write_text(json.dumps(counts))
    done = {json.loads(line)["test"] for line in _lines(RESULTS)}
    kept = {
        id(item)
        for sample in drawn.values()
        for item in sample
        if item.nodeid not in done and _hash(item) % SHARES == SHARE
    }
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def _sample(tests: list[list[pytest.Item]]) -> list[pytest.Item]:
    """One parametrisation of each test before a second of any, so that a sample has every test.

    Only names decide the order, so a larger sample has all of a smaller one.
    """
    places = []
    for parametrisations in tests:
        ranked = sorted(parametrisations, key=_hash)[: PER_TEST or None]
        places += [(place > 0, _hash(item), item) for place, item in enumerate(ranked)]
    return [item for *_, item in sorted(places, key=lambda place: place[:2])][: LIMIT or None]


def _hash(item: pytest.Item) -> int:
    return zlib.crc32(f"{SEED} {item.nodeid}".encode())


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A module that cannot be imported is one failure, or one skipped test."""
    if report.outcome != "passed":
        _record(report.nodeid, report.outcome, 0.0, str(report.longrepr)[-2000:])


def pytest_runtest_logstart(nodeid: str) -> None:
    """Say which test runs, in case that nobody can say so afterwards."""
    if RECORDS:
        RUNNING.write_text(nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The same random inputs in every run and in every order."""
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Remove the packages that the tests of a class left behind; stop before memory runs out."""
    if nextitem is None or nextitem.parent is not item.parent:
        for entry in SCRATCH.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    if MEMORY and _memory() > MEMORY:
        item.session.shouldstop = "the process has grown too large"


def _memory() -> int:
    """Bytes of memory at the peak of this process. `resource` is not on every system."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run coroutines, so that no plugin is needed for them."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
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
    """Record what decided: the call, or what failed or skipped before or after it."""
    if report.when == "call" or report.outcome != "passed":
        outcome: str = report.outcome
        if hasattr(report, "wasxfail"):
            outcome = "xfailed" if report.outcome == "skipped" else "xpassed"
        reason = dict(report.user_properties).get("reason", "")
        _record(report.nodeid, outcome, report.duration, str(reason))


def pytest_runtest_logfinish() -> None:
    """The process outlived the test."""
    RUNNING.unlink(missing_ok=True)


def _record(test: str, outcome: str, seconds: float, reason: str) -> None:
    if RECORDS:
        line = {"test": test, "outcome": outcome, "seconds": round(seconds, 3), "reason": reason}
        with RESULTS.open("a") as file:
            file.write(json.dumps(line) + "\n")
