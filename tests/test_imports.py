"""What is quick to look at imports nothing slow: each case is a process of its own. Scripts that no
test runs import names that are there."""

import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

SLOW = {
    "numpy",
    "torch",
    "transformers",
    "coremltools",
    "numba",
    "matplotlib",
    "onnx",
    "onnxruntime",
}
LIGHT = (
    "cetane",
    "cetane.checkpoint",
    "cetane.compress",
    "cetane.doctor",
    "cetane.files",
    "cetane.gates.limits",
    "cetane.hardware.chips",
    "cetane.lab.document",
    "cetane.lab.experiment",
    "cetane.lab.journal",
    "cetane.schema.draft_head",
    "cetane.schema.manifest",
    "cetane.schema.plan",
    "cetane.bundle",
)
COMMANDS = {
    "help": ["--help"],
    "version": ["--version"],
    "info": ["info", "."],
    "doctor": ["doctor"],
    "lab list": ["lab", "list"],
    "lab show": ["lab", "show", "duo-attention"],
    "no bundle": ["validate", "nothing"],
    "no package": ["diff", "nothing", "none"],
}
REPORT = "import sys, json; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"


def imported(code: str, folder: Path) -> set[str]:
    """The top-level modules that a program has imported when it ends."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{REPORT}"],
        capture_output=True, text=True, cwd=folder, check=True,
    )  # fmt: skip
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module(module: str, tmp_path: Path) -> None:
    assert not imported(f"import {module}", tmp_path) & SLOW


def test_nothing_is_told_to_anybody(tmp_path: Path) -> None:
    """onnxruntime's telemetry keeps a device's id in the home folder when it starts."""
    environment = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    environment |= dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"), str(tmp_path))
    code = "import cetane, onnxruntime"
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))


def imported_by(arguments: list[str], folder: Path) -> set[str]:
    """The top-level modules that a command has imported when it ends."""
    code = (
        "import sys\nfrom cetane.cli import main\n"
        f"sys.argv = ['cetane', *{arguments!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass"
    )
    return imported(code, folder)


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_light_command(arguments: list[str], tmp_path: Path) -> None:
    assert not imported_by(arguments, tmp_path) & SLOW


@pytest.mark.parametrize("command", ["plan", "port"])
def test_no_model(command: str, tmp_path: Path) -> None:
    assert not imported_by([command, "nothing"], tmp_path) & (SLOW - {"numpy"})


def test_a_verdict_is_told_without_what_judges(tmp_path: Path) -> None:
    """`info` tells the verdicts of a bundle."""
    code = "from cetane.cli.info import outcome; outcome({'passed': True, 'limits': ''})"
    assert not imported(code, tmp_path) & SLOW


def test_a_build_needs_no_torch_before_it_plans(tmp_path: Path) -> None:
    """A bundle that a store has is fetched without a plan."""
    needless = SLOW - {"numpy"}
    assert not imported("import cetane.pipeline.build", tmp_path) & needless
    assert not imported("import cetane.pipeline.request", tmp_path) & needless


def test_an_assembly_needs_no_compiler_before_it_encodes_or_converts(tmp_path: Path) -> None:
    """Its parts may be in a store; numba takes half a second to load."""
    assert not imported("import cetane.pipeline.assembly", tmp_path) & {"numba", "coremltools"}


@pytest.mark.parametrize("folder", ["benchmarks", "scripts", "tests/fuzz"])
def test_names_that_scripts_import_are_there(folder: str) -> None:
    root = Path(__file__).parents[1]
    missing = []
    for path in sorted((root / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("cetane"):
                continue
            module = importlib.import_module(node.module or "")
            modules = {entry.name for entry in iter_modules(getattr(module, "__path__", []))}
            missing += [
                f"{path.name}: {node.module} has no {alias.name}"
                for alias in node.names
                if alias.name not in modules and not hasattr(module, alias.name)
            ]
    assert not missing
