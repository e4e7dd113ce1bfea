"""Libraries that coremltools would load for nothing."""

import importlib
import subprocess
import sys

import pytest

from cetane.hardware.quiet import hidden


def test_a_hidden_library() -> None:
    sys.modules.pop("colorsys", None)
    with hidden("colorsys"), pytest.raises(ImportError):
        importlib.import_module("colorsys")
    assert importlib.import_module("colorsys").rgb_to_hsv(0, 0, 0) == (0, 0, 0)
    with hidden("colorsys"):
        assert importlib.import_module("colorsys") is sys.modules["colorsys"]


def test_coremltools_alone() -> None:
    code = (
        "import sys; from cetane.hardware.quiet import import_coremltools; import_coremltools();"
        "assert not {'sklearn', 'pandas'} & set(sys.modules); import numpy, coremltools"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
