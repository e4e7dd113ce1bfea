"""A kit of two tiny bundles, and the ways to run its script here."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.pipeline.kit import make_kit

STUB = Path(__file__).parent / "stub"
ONE = {"layout": {"kind": "single"}, "verify": None, "prefill": None, "context": 32}


@pytest.fixture(scope="session")
def pair(
    tiny_bundle: Callable[..., Bundle], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Bundle]:
    """Two bundles of one function each: fp16, and int8 with a cache that the graph blends."""

    def copy(**options: Any) -> Bundle:
        """A kit writes what it expects into its bundles."""
        target = tmp_path_factory.mktemp("bundles") / "tiny"
        return Bundle(shutil.copytree(tiny_bundle(**ONE, **options).path, target))

    return copy(), copy(contract="blend", compression={"default": "int8-per-channel"})


@pytest.fixture(scope="session")
def archive(pair: tuple[Bundle, Bundle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their kit."""
    target = tmp_path_factory.mktemp("kit") / "kit.zip"
    return make_kit([bundle.path for bundle in pair], target).path


@pytest.fixture
def kit(archive: Path, tmp_path: Path) -> Path:
    """The kit, unpacked."""
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path)
    return tmp_path / "kit"


def environment(stub: bool = True, **others: str) -> dict[str, str]:
    """The environment of a script. A stand-in takes the place of coremltools."""
    paths = [str(STUB)] if stub else [str(Path(__file__).parents[2] / "src")]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    kept = {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | own | others


def run(
    kit: Path, *arguments: str, prefix: tuple[str, ...] = (), **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run the kit's script to its end."""
    quick = ("--rounds", "2", "--steps", "3", "--energy", "0")
    return subprocess.run(
        [sys.executable, *prefix, "measure.py", *quick, *arguments],
        cwd=kit, env=options.pop("env", environment()), text=True, capture_output=True, **options,
    )  # fmt: skip


def record(kit: Path) -> dict[str, Any]:
    """What it wrote."""
    content: dict[str, Any] = json.loads((kit / "measurements.json").read_text())
    return content
