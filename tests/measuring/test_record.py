"""The record of a kit: it goes on only where it began."""

import json
from pathlib import Path
from typing import Any

import pytest

from cetane.measuring.machine import facts
from cetane.measuring.record import Halt, RunRecord


def start(**machine: Any) -> dict[str, Any]:
    options = {"compute_units": "CPU_AND_NE", "rounds": 1, "steps": 1}
    return {"kit": "0" * 64, "machine": facts() | machine, "options": options}


@pytest.mark.parametrize(
    "other",
    [
        {"chip": "Apple M1"}, {"model": "Mac14,3"}, {"system": "macOS 27.0"}, {"build": "27A1"},
        {"coremltools": "9.1"}, {"numpy": "1.26.4"}, {"python": "3.11.9"}, {"memory_bytes": 1},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_machine_or_system_does_not_go_on(tmp_path: Path, other: dict[str, Any]) -> None:
    """One record says of all its figures that they are of one machine."""
    path = tmp_path / "measurements.json"
    RunRecord(path, start()).save()
    before = path.read_bytes()
    ((name, value),) = other.items()
    with pytest.raises(Halt, match=f"its {name} is .*, and here it is {value}; move it away"):
        RunRecord(path, start(**other))
    assert path.read_bytes() == before


def test_power_and_load_may_change(tmp_path: Path) -> None:
    path = tmp_path / "measurements.json"
    RunRecord(path, start(load=0.5)).save()
    again = RunRecord(path, start(power="Battery Power", thermal="hot", load=7.0))
    assert again.content == json.loads(path.read_text())
