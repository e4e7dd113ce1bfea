"""Every translation against numpy: the cases of the reference's ops, run by onnxruntime."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cetane.errors import CetaneError
from cetane.mil import MilFunction, Program
from cetane.mil.fast import FastProgram
from cetane.mil.fast.ops import TRANSLATIONS

spec = importlib.util.spec_from_file_location(
    "reference_cases", Path(__file__).parents[1] / "test_ops.py"
)
assert spec is not None and spec.loader is not None
reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reference)


def lacks(case: Any) -> bool:
    """Whether this use of an op is left to the reference executor."""
    return (
        (case.op not in TRANSLATIONS and bool(case.inputs))  # without, it is a constant
        or case.params.get("mode") == "div"
        or ("dilations" in case.params and "same" in case.params["pad_type"])
        or (case.op == "gather" and "batch_dims" in case.params)
        or (case.op == "slice_update" and "squeeze_mask" in case.params)
    )


def compile_fast(function: MilFunction, precision: str) -> Any:
    """A function as the cases use it, compiled for onnxruntime."""
    assert precision == "fp32"
    return FastProgram(Program(Path(), {"main": function})).function("main")


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "compile", compile_fast)


@pytest.mark.parametrize("case", [c for c in reference.CASES if not lacks(c)], ids=str)
def test_translation(case: Any, build: Callable[..., Any]) -> None:
    reference.test_op(case, build)


@pytest.mark.parametrize("case", [c for c in reference.CASES if lacks(c)], ids=str)
def test_what_has_no_translation_says_so(case: Any, build: Callable[..., Any]) -> None:
    with pytest.raises(CetaneError, match=case.op):
        reference.test_op(case, build)


def test_every_translation_has_a_case() -> None:
    # These are no ops of MIL: see test_fusion, test_packed.
    kinds = {kind for kind in TRANSLATIONS if not kind.startswith("fast:")}
    assert kinds <= {case.op for case in reference.CASES}
