"""Caches of 8 bits: runtimes with a host of their own refuse them by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.pipeline.export import export_coreai, export_onnx, export_runtime


@pytest.mark.parametrize(
    ("export", "what"),
    [
        (export_onnx, "the layout onnx"),
        (lambda source, target: export_runtime(source, target, "anemll"), "ANEMLL's runtime"),
        (export_coreai, "Core AI's host"),
    ],
)
def test_a_refusal(
    tiny_bundle: Callable[..., Bundle], tmp_path: Path, export: Callable[..., Any], what: str
) -> None:
    bundle = tiny_bundle(
        cache={"context": 64, "format": "int8"},
        target={"deployment": "iOS26"},
        layout={"kind": "single"},
    )
    with pytest.raises(CetaneError, match=f"{what} takes keys and values in fp16") as error:
        export(bundle.path, tmp_path / "out")
    assert "cache.format=fp16" in str(error.value.hint)
    assert not (tmp_path / "out").exists()
